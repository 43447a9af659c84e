"""Import this first in a process that interprets kernels: it hides the driver, and lets triton 3.6 use numpy 2.4."""

from typing import Any

import no_driver  # noqa: F401
import triton
from triton.runtime import interpreter

if triton.__version__.startswith("3.6."):  # https://github.com/triton-lang/triton/issues/9171
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor
