"""Every exception that weft raises, with the call as written, what was seen, and what to write
instead; warnings."""

# The most characters of a call in an error's text; the middle of a longer one is left out.
_LONGEST = 400


class WeftError(Exception):
    """Base of weft's exceptions.

    Args:
        call: the call as the user wrote it, values included.
        problem: what was found, with the offending values.
        instead: what to write or do instead.

    >>> raise ConfigError("weft.load('m')", "config.json has hidden_act='gelu'", "use a model with hidden_act='silu'")
    Traceback (most recent call last):
        ...
    weft.errors.ConfigError: weft.load('m')
      saw: config.json has hidden_act='gelu'
      instead: use a model with hidden_act='silu'
    """

    def __init__(self, call: str, problem: str, instead: str) -> None:
        super().__init__(call, problem, instead)
        self.call = call
        self.problem = problem
        self.instead = instead

    def __str__(self) -> str:
        call = self.call
        half = _LONGEST // 2
        if len(call) > _LONGEST:
            call = f"{call[:half]} … {call[-half:]}"
        return f"{call}\n  saw: {self.problem}\n  instead: {self.instead}"


class ArgumentError(WeftError, TypeError):
    """A call with an argument that the function does not have, or of a type that it cannot take."""


class DescriptorError(WeftError, ValueError):
    """A batch or a descriptor that contradicts itself, or that does not cover what it should."""


class TreeError(WeftError, TypeError):
    """A class that cannot be a pytree."""


class DonatedError(WeftError, RuntimeError):
    """A value used after its storage was donated."""


class CaptureError(WeftError, RuntimeError):
    """A function that cannot be captured: it reads the host, branches on data, or writes what it
    does not own."""


class CacheMissError(WeftError, RuntimeError):
    """A call to a frozen graphified function that would have to capture."""


class VerificationError(WeftError, AssertionError):
    """A replay that differs from the function itself, found by `graphify(..., verify=n)`."""


class DerivativeError(WeftError, NotImplementedError):
    """A derivative that an operator does not have."""


class TooManyCapturesError(WeftError, AssertionError):
    """A capture inside `weft.assert_max_captures(n)` that is one too many."""


class StaleResultError(WeftError, RuntimeError):
    """A borrowed result used after the replay that overwrote it."""


class ConfigError(WeftError, ValueError):
    """A model configuration with a field that weft does not support, or, if it is read strictly,
    does not know."""


class ConfigWarning(UserWarning):
    """A model configuration with fields that weft does not know, and ignores."""


class LoweredModeWarning(UserWarning):
    """A graph mode in which the attention cannot run, and which was lowered. To have an error
    instead: `warnings.simplefilter("error", weft.errors.LoweredModeWarning)`."""


class CheckpointError(WeftError, ValueError):
    """A checkpoint whose tensors are damaged, missing, or of a shape that the configuration
    contradicts."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint folder, or a file that its index names, that is not there."""

    # OSError would print its errno form of the three arguments.
    __str__ = WeftError.__str__


class RequestError(WeftError, ValueError):
    """A prompt or a generation argument that no model could serve."""


class LogitsError(WeftError, ArithmeticError):
    """Logits that are NaN: the error of a request that ends because of them."""


class EngineError(WeftError, RuntimeError):
    """An engine that cannot go on: one of its steps raised."""


class CostError(WeftError, ValueError):
    """A cost or a time that is negative, not finite, or missing for a stage."""


class CheckError(WeftError, ValueError):
    """A check of laws, or of an equivalence, with arguments that would test nothing."""


class ProgramError(WeftError, ValueError):
    """A pipeline program that could not be built, or that the check refused."""


class MeshError(WeftError, ValueError):
    """A mesh, a placement or a collective that contradicts the others, or the tensors that it is
    for."""


class RankError(WeftError, RuntimeError):
    """A rank of a pipeline that raised, exited or stalled, as seen by the others.

    Args:
        call, seen, instead: as for any WeftError.
        rank: the rank that failed.
        instruction: the effect that it was about to perform, as its program prints it.
        cause: the error there.
    """

    def __init__(
        self,
        call: str,
        problem: str,
        instead: str,
        rank: int | None = None,
        instruction: str = "",
        cause: str = "",
    ) -> None:
        super().__init__(call, problem, instead)
        self.rank = rank
        self.instruction = instruction
        self.cause = cause


class MissingPackageError(WeftError, ImportError):
    """An optional package that is needed, and not installed."""


class DeviceError(WeftError, RuntimeError):
    """A device or a back end that this machine does not have."""
