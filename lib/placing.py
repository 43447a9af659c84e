"""From the host to a device, behind what the device still has to do: nobody waits."""

import torch
from torch import Tensor


def place(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on `device`, from wherever it is.

    A copy from pageable memory waits until the device has done all that came before, and a host that is to be steps
    ahead would stand still. So it goes through pinned memory, which torch keeps until the copy has been made.
    """
    if x.device.type != "cpu" or torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
