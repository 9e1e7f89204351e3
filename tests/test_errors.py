"""The error tree: what it holds, what its texts say, and that the docstring tells the truth."""

from __future__ import annotations

import doctest
import inspect
import pickle
import re

import pytest

from trilane import errors

ERRORS = sorted(
    (e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, Exception)),
    key=lambda e: e.__name__,
)


def test_every_error_is_a_trilane_error_and_is_exported() -> None:
    for error in ERRORS:
        assert issubclass(error, errors.TrilaneError)
        assert error.__name__ in errors.__all__


def test_all_is_sorted_and_complete() -> None:
    assert errors.__all__ == sorted(errors.__all__)
    assert all(hasattr(errors, name) for name in errors.__all__)


def test_the_tree_in_the_docstring_is_the_tree_of_the_code() -> None:
    drawn = dict(re.findall(r"\+-- (\w+)\s+\((\w+)\)", errors.__doc__ or ""))
    assert set(drawn) == {e.__name__ for e in ERRORS} - {"TrilaneError"}
    for name, builtin in drawn.items():
        assert builtin in {base.__name__ for base in getattr(errors, name).__mro__}


@pytest.mark.parametrize("name", ["StoreError", "RoutingError", "ArrayError", "ProfileError"])
def test_bad_values_can_be_caught_as_value_errors(name: str) -> None:
    with pytest.raises(ValueError, match="expert id is 40"):
        raise getattr(errors, name)("expert id is 40")


def test_config_error_lists_every_problem_with_its_path() -> None:
    error = errors.ConfigError(
        [errors.Problem("cache.slots", "is -1"), errors.Problem("cpu.isa", "is 'sse'")], source="a.yaml"
    )
    assert str(error) == "2 problems in a.yaml:\n  cache.slots: is -1\n  cpu.isa: is 'sse'"
    assert str(errors.ConfigError(error.problems[:1])).startswith("1 problem:")


def test_config_error_survives_a_pickle() -> None:
    error = errors.ConfigError([errors.Problem("cpu.isa", "is 'sse'")], source="a.yaml")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == error.problems and copy.source == "a.yaml" and str(copy) == str(error)


def test_examples_in_docstrings_run() -> None:
    result = doctest.testmod(errors)
    assert result.attempted >= 3 and result.failed == 0
