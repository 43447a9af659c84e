from . import plugin as plugin, strategies as strategies
from .checks.check import check as check
from .checks.code import to_code as to_code
from .checks.difference import (
    Difference as Difference,
    LawViolation as LawViolation,
    assert_equal as assert_equal,
    find_difference as find_difference,
)
from .checks.elements import Tolerance as Tolerance
from .checks.engine_machine import engine_machine as engine_machine
from .checks.equivalence import (
    Counterexample as Counterexample,
    assert_equivalent as assert_equivalent,
)
from .checks.served_model import CompletionRequest as CompletionRequest
