"""`EngineLoop`: applies commands, steps an engine, and reports what each step made, in messages
that can be sent to another process."""

import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from weft.errors import EngineError, RankError, RequestError
from weft.transforms.engine.engine import Engine, is_under_way
from weft.transforms.engine.outputs import RequestOutput
from weft.transforms.engine.requests.masks import blame
from weft.transforms.engine.stats import Stats
from weft.transforms.server.commands import FAULTS, Abort, Add, Ask, Command, MakeMask, Stop

_LOG = logging.getLogger("weft.server")
# What is new in a completion: the request's name, the completion's index, new tokens, new text,
# finish reason, and further fields by name. A step makes one for each row, so they are tuples,
# which take a fifth of the time of objects to pickle.
Delta = tuple[str, int, list[int], str | None, str | None, dict[str, Any]]

# Lists of `CompletionState` that grow by one entry per token; they are sent if the request asks for
# logprobs. `text_offsets` has entries only if the engine makes the completion's text.
PER_TOKEN = ("logprobs", "top_logprobs", "text_offsets")
# Lists of `CompletionState` about the prompt; they are sent with the first token.
PER_PROMPT = ("prompt_logprobs", "prompt_top_logprobs", "prompt_ranks")


@attrs.frozen
class Told:
    """The answer to `Ask`."""

    number: int
    stats: Stats


@attrs.frozen
class Ended:
    """The end of the loop.

    Args:
        fault: the error that a step raised; None: the loop was told to end.
        is_final: whether the process cannot continue, because a rank has ended.
    """

    fault: str | None
    is_final: bool = False

    def error(self) -> EngineError:
        """The error for requests that were under way."""
        if self.fault is None:
            return EngineError(
                "engine.step()", "a server that was stopped", "the same request later"
            )
        return EngineError(
            "engine.step()", self.fault, "start the server anew; its log has the error"
        )


Message = list[Delta] | Told | Ended


class EngineLoop:
    """Runs an engine for a server. The engine is only called in the thread that calls `run`.

    Args:
        engine: the engine of the first rank.
        make_mask: makes the mask of a `response_format`.
        deliver: receives the messages, in the thread of `run`. It must not block.
        num_ranks: processes in which stages of the engine run; all but the first call `follow`.

    Attributes:
        inbox: the queue of commands, which any thread may fill.
        fault: the error that a step raised.
    """

    def __init__(
        self,
        engine: Engine,
        make_mask: MakeMask,
        deliver: Callable[[Message], None],
        *,
        num_ranks: int = 1,
    ) -> None:
        self.engine = engine
        self.inbox = queue.SimpleQueue[Command]()
        self.fault: BaseException | None = None
        self._make_mask = make_mask
        self._deliver = deliver
        self._num_ranks = num_ranks
        self._captured = set[str]()

    def run(self) -> None:
        """Run until `Stop`, or until a step raises."""
        ended = Ended(None)
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.fault = error
            _LOG.error(
                "a step of the engine raised; the server takes no more requests", exc_info=error
            )
            ended = Ended(f"{type(error).__name__}: {error}", isinstance(error, RankError))
        # After an error, too: clients would wait forever for the rest of their answers.
        self._deliver(ended)

    def _turn(self) -> bool:
        """Apply the waiting commands and step once; return False to end."""
        commands = self._take()
        # Every rank must apply the same commands before the same step. Only this one answers `Ask`.
        if self._num_ranks > 1:
            self.engine.transport.share([each for each in commands if not isinstance(each, Ask)])
        for command in commands:
            self._apply(command)
        if any(isinstance(command, Stop) for command in commands):
            return False
        if not self.engine.is_idle and (outputs := self.engine.step()):
            self._deliver([self._delta(output) for output in outputs])
        return True

    def _apply(self, command: Command) -> None:
        try:
            command.apply(self.engine, self._make_mask)
        # The error of one request must not end the loop, and with it all others.
        except (RequestError, *FAULTS) as error:
            if isinstance(command, Add):
                fault = blame(error, "the request", "other values of its fields")
                self._deliver([(command.name, 0, [], None, "error", {"error": fault})])
            return
        if isinstance(command, Ask):
            self._deliver(Told(command.number, self.engine.stats()))
        elif isinstance(command, Add) and command.captured:
            self._captured.add(command.name)
        elif isinstance(command, Abort):
            self._captured.discard(command.name)

    def _take(self) -> Sequence[Command]:
        """The waiting commands. An idle engine waits for one, though not so long that the other
        ranks, which wait for this one, time out."""
        commands = list[Command]()
        wait = self.engine.is_idle
        if self._num_ranks == 1:
            longest = None
        else:
            longest = getattr(self.engine.transport, "timeout", 30.0) / 4
        while True:
            try:
                commands.append(self.inbox.get(block=wait, timeout=longest))
            except queue.Empty:
                return commands
            wait = False

    def _delta(self, output: RequestOutput) -> Delta:
        state = output.track
        tokens = output.token_ids
        reason = output.finish_reason
        sampling = state.request.sampling
        more = dict[str, Any]()
        start = len(state.token_ids) - len(tokens)
        if sampling.logprobs is not None:
            more |= {name: getattr(state, name)[start:] for name in PER_TOKEN}
        if sampling.prompt_logprobs is not None and tokens and not start:
            more |= {name: [*getattr(state, name)] for name in PER_PROMPT}
        if output.error is not None:
            more["error"] = output.error
        if reason == "stop" and state.stop_reason is not None:
            more["stop_reason"] = state.stop_reason
        if reason is not None and output.id in self._captured:
            more["captured"] = {name: values.cpu() for name, values in state.captured.items()}
            # A request with n > 1 is under way until its last completion ends.
            if not is_under_way(self.engine, output.id):
                self._captured.discard(output.id)
        return output.id, output.index, tokens, output.text, reason, more
