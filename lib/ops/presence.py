"""Whether triton is there."""

from weft.errors import DeviceError


def triton_version() -> str | None:
    """The version of the triton that the CUDA kernel would use, or None where there is none."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def no_triton(call: str) -> DeviceError:
    """The error of `call` on a CUDA device without triton."""
    return DeviceError(call, "triton cannot be imported, and CUDA has no other kernel", "pip install 'weft[cuda]'")
