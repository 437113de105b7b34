"""A conformance kit for architectures of third parties: the whole contract in one call.

Needs no test framework: `assert_contract` raises, and every test runner understands that.
"""

from poros.testing.contract import CLAUSES, ContractReport, assert_contract, check_contract
from poros.testing.subject import ContractError

__all__ = ["CLAUSES", "ContractError", "ContractReport", "assert_contract", "check_contract"]
