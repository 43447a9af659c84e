"""The exceptions that weft raises, each with the call as written, what was seen, and what to write
instead; and its warnings."""

from weft.tracebacks import render

# The most characters of a call in an error's text; of a longer one, the middle is left out.
_LONGEST = 400


class WeftError(Exception):
    """Base of weft's exceptions.

    Args:
        call: the call as the user wrote it, values included.
        problem: what weft saw, with the offending values.
        instead: what to write or do instead.

    >>> raise ConfigError("weft.load('m')", "config.json has hidden_act='gelu'", "use a model with hidden_act='silu'")
    Traceback (most recent call last):
        ...
    weft.errors.ConfigError: weft.load('m')
      saw: config.json has hidden_act='gelu'
      instead: use a model with hidden_act='silu'
    """

    def __init__(self, call: str, problem: str, instead: str) -> None:
        # These become `args`, from which pickle makes the error anew in another process.
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

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows, which looks for a method of this name. An error that is no
        WeftError, such as a bug in weft, is shown with all of its frames."""
        return render(self)


class ArgumentError(WeftError, TypeError):
    """A call with an argument that the function does not have, or of a type that it cannot take."""


class DescriptorError(WeftError, ValueError):
    """A batch or descriptor that contradicts itself, or a descriptor that does not cover a batch
    that it should."""


class TreeError(WeftError, TypeError):
    """A class that cannot be a pytree."""


class DonatedError(WeftError, RuntimeError):
    """A value used after its storage was donated."""


class CaptureError(WeftError, RuntimeError):
    """A function that cannot be captured: it reads tensors on the host, branches on data, or writes
    what it does not own."""


class CompilerError(WeftError, RuntimeError):
    """A function that a compiler does not take, or a compiler that does not work here."""


class CacheMissError(WeftError, RuntimeError):
    """A call to a frozen graphified function that would need a new capture."""


class VerificationError(WeftError, AssertionError):
    """A replay whose result differs from the function's, detected by `graphify(..., verify=n)`."""


class DerivativeError(WeftError, NotImplementedError):
    """A derivative that an operator does not have."""


class TooManyCapturesError(WeftError, AssertionError):
    """A capture beyond the n that `weft.assert_max_captures(n)` allows."""


class StaleResultError(WeftError, RuntimeError):
    """A borrowed result used after the replay that overwrote it."""


class ConfigError(WeftError, ValueError):
    """A model configuration with a field that weft does not support, or, in strict mode, does not
    know."""


class ConfigWarning(UserWarning):
    """A model configuration with fields that weft does not know, and ignores."""


class LoweredModeWarning(UserWarning):
    """A graph mode that was lowered because the attention cannot run in it. To get an error
    instead: `warnings.simplefilter("error", weft.errors.LoweredModeWarning)`."""


class CheckpointError(WeftError, ValueError):
    """A checkpoint whose tensors are damaged or missing, or whose shapes contradict the
    configuration."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint folder, or a file named in its index, that does not exist."""

    # OSError's own `__str__` would take the three arguments for errno, message and file name.
    __str__ = WeftError.__str__


class RequestError(WeftError, ValueError):
    """A prompt or a generation argument that no model could serve."""


class LogitsError(WeftError, ArithmeticError):
    """A request that ended because its logits are NaN."""


class EngineError(WeftError, RuntimeError):
    """An engine that cannot go on: one of its steps raised."""


class CostError(WeftError, ValueError):
    """A cost or a time that is negative, not finite, or missing for a stage."""


class CheckError(WeftError, ValueError):
    """A check of laws or of an equivalence, with arguments under which it would test nothing."""


class ProgramError(WeftError, ValueError):
    """A pipeline program that could not be built, or that failed its check."""


class MeshError(WeftError, ValueError):
    """A mesh, placement or collective that contradicts another one, or the tensors that it is used
    with."""


class RankError(WeftError, RuntimeError):
    """A rank of a pipeline that raised, exited or stalled, as seen by the others.

    Args:
        call, problem, instead: as for any WeftError.
        rank: the rank that failed.
        instruction: the effect that it was about to perform, as its program prints it.
        cause: the error on that rank.
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
    """An optional package that is needed but not installed."""


class DeviceError(WeftError, RuntimeError):
    """A device or backend that this machine does not have."""
