"""A graphified function as a method: the instance is the first argument of each call."""

import functools
import inspect
from typing import Any

# The methods of `Graphified` that take the arguments of a call.
_TAKE_CALL_ARGUMENTS = ("capture", "compile_ahead", "explain", "lower", "memory_estimate")


class Method:
    """A graphified function bound to an instance, which is its first argument. All other attributes
    are the function's."""

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance
        self.__doc__ = function.__doc__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.__func__, name)
        if name in _TAKE_CALL_ARGUMENTS:
            return functools.partial(attribute, self.__self__)
        return attribute

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    def __repr__(self) -> str:
        return f"<{self.__func__!r} of {self.__self__!r}>"
