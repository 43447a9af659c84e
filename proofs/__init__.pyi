from . import laws as laws, plugin as plugin, strategies as strategies
from .checking import check as check
from .code import to_code as to_code
from .difference import Difference as Difference, LawViolation as LawViolation, find_difference as find_difference
from .elements import Tolerance as Tolerance
from .equivalence import Counterexample as Counterexample, assert_equivalent as assert_equivalent
