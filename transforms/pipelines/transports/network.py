"""Where a run's processes are, and at which address each listens."""

from collections.abc import Mapping

import attrs

from weft.errors import ProgramError
from weft.transforms.pipelines.transports.secret import LEAST, OWN, VARIABLE as SECRET, Secret

ADDRESS = "WEFT_ADDRESS"
LOOPBACK = "127.0.0.1"


@attrs.frozen
class Network:
    """Where a run's processes are, by the launcher's variables.

    Args:
        address: of this machine, where connections of this rank listen.
        one_node: whether all ranks are on this machine.
        secret: the run's, where it was given.
    """

    address: str
    one_node: bool
    secret: Secret | None

    @classmethod
    def of(cls, environment: Mapping[str, str], num_ranks: int) -> "Network":
        """What the variables say: on one node the loopback address; on several the one that the user named.

        Raises:
            ProgramError: several nodes, and no address or no secret; or a secret that is easily guessed.
        """
        given, call = environment.get(SECRET), "Distributed()"
        if given is not None and len(given) < LEAST:
            raise ProgramError(call, f"{SECRET} of {len(given)} characters", f"at least {LEAST}: {OWN}")
        secret = None if given is None else Secret(given.encode())
        master = environment.get("MASTER_ADDR", LOOPBACK)
        local = environment.get("LOCAL_WORLD_SIZE") == str(num_ranks)
        if local or master in ("localhost", "::1") or master.startswith("127."):
            return cls(LOOPBACK, True, secret)
        seen = f"ranks on several nodes (MASTER_ADDR={master}), and no "
        if secret is None:
            raise ProgramError(call, seen + SECRET, OWN)
        if ADDRESS not in environment:
            instead = f"export {ADDRESS}=<the address of this node that the other nodes reach>, on each node"
            raise ProgramError(call, seen + ADDRESS, instead)
        return cls(environment[ADDRESS], False, secret)
