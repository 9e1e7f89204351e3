"""What is wrong with a configuration, in sentences: the value, the rule, the remedy, a nearest name.

Turns what pydantic found into :class:`~trilane.errors.Problem` objects, one a path, and goes on behind the first
findings, so that rules across options are checked although some option is wrong. The file knows that a
configuration has sections of options; which ones, it reads off the model that it is given.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from trilane.errors import Problem, did_you_mean

Model = type[BaseModel]
Location = tuple[int | str, ...]

_MAX_SHOWN = 60  # characters of a value or a name in a message
_RULE = "rule_across_options"
_RULES = {
    "model_type": "must be a mapping of options, one a line and indented",
    "invalid_key": "must be the name of an option",
    "too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list, such as [stream, cpu]",
    "none_required": "null",
}


def shown(value: object) -> str:
    """A value as a message shows it: short, printable, and whatever it is.

    >>> shown("auto"), shown(0.5), shown(None), shown(True)
    ("'auto'", '0.5', 'null', 'true')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(value)
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = _MAX_SHOWN
    try:
        text = short.repr(value)
    except Exception:  # a caller's object with a broken repr, or an int of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text.encode("ascii", "backslashreplace").decode()


def path_text(location: Sequence[int | str]) -> str:
    """``("policy", "lanes", 1)`` -> ``policy.lanes.1``; a part that is no plain name is quoted.

    >>> path_text(("cache", "a.b"))
    "cache.'a.b'"
    """
    parts = [str(part) if re.fullmatch(r"[\w-]{1,60}", str(part), re.ASCII) else shown(part) for part in location]
    return ".".join(parts) or "configuration"


def rule_error(option: str, text: str) -> PydanticCustomError:
    """What a rule across options raises: the option to change, and a sentence with its value and the rule."""
    return PydanticCustomError(_RULE, "{text}", {"text": text, "option": option})


def find_problems(
    model: Model, sections: Mapping[str, Any], error: ValidationError
) -> tuple[list[Problem], dict[str, Any]]:
    """Every problem of ``sections``, of which ``error`` is what the first look found, and what is sound of them.

    Rules across options run only where each option is right, so what is wrong is taken out and the rest is
    looked at again, until nothing more is found.
    """
    found: dict[str, Problem] = {}
    left = {name: dict(value) if isinstance(value, Mapping) else value for name, value in sections.items()}
    more: ValidationError | None = error
    while more is not None:
        details = [_located(detail) for detail in more.errors(include_url=False)]
        for problem in _sentences(model, details):
            found.setdefault(problem.path, problem)
        taken = [_take_out(left, detail["loc"]) for detail in details]
        more = _look_again(model, left) if any(taken) else None
    for path, rivals in _wrong_rivals(model, sections, found):
        found[path] = replace(found[path], message=f"{found[path].message} {rivals}")
    return list(found.values()), left


def _wrong_rivals(model: Model, sections: Mapping[str, Any], found: Mapping[str, Problem]) -> Iterator[tuple[str, str]]:
    """Of options that exclude each other, those that are wrong themselves, and what stands beside each.

    The rule is not asked where one of them is wrong, and would be met only once that is right.
    """
    for name, options in sections.items():
        rivals = getattr(section_of(model, name), "one_of", ())
        given = [one for one in rivals if isinstance(options, Mapping) and options.get(one) is not None]
        for one in given:
            if len(given) > 1 and f"{name}.{one}" in found and "keep one of them" not in found[f"{name}.{one}"].message:
                others = " and ".join(f"{name}.{other}" for other in given if other != one)
                yield f"{name}.{one}", f"It stands beside {others}: keep one of them."


def _look_again(model: Model, sections: Mapping[str, Any]) -> ValidationError | None:
    try:
        BaseModel.__init__(model.__new__(model), **sections)  # the model's own raises what is made here
    except ValidationError as error:
        return error
    return None


def _take_out(sections: dict[str, Any], location: Location) -> bool:
    """Drop the option of a finding, or its section where it is no option's; whether something was dropped."""
    name, *rest = location or ("",)
    section = sections.get(str(name))
    if not (rest and isinstance(section, dict)):
        return sections.pop(str(name), None) is not None
    if rest[0] in section:
        del section[rest[0]]
        return True
    wrong = [key for key in section if not isinstance(key, str)]  # located by their text
    for key in wrong:
        del section[key]
    return bool(wrong)


def _located(detail: Any) -> dict[str, Any]:
    """A finding whose location ends at an option: names of a union's branches are dropped, a rule's option added."""
    location = detail["loc"]
    if detail["type"] == _RULE:
        location = (*location, detail["ctx"]["option"])
    kept = (*location[:2], *(part for part in location[2:] if isinstance(part, int)))
    return {**detail, "loc": kept}


def _sentences(model: Model, details: Sequence[Any]) -> Iterator[Problem]:
    """One problem per path; the branches of a union ("int or 'auto'") become one sentence."""
    rules: dict[str, list[str]] = {}
    first: dict[str, Any] = {}
    for detail in details:
        if detail["type"] == "too_short" and detail["input"]:
            continue  # a list of wrong items only, which are told themselves
        path = path_text(detail["loc"])
        rules.setdefault(path, []).append(_rule(detail))
        first.setdefault(path, detail)
    for path, texts in rules.items():
        rule = " or ".join(dict.fromkeys(texts)).replace(" or must be ", " or ")
        yield Problem(path, _sentence(model, first[path], rule))


def _sentence(model: Model, detail: Any, rule: str) -> str:
    location, value = detail["loc"], detail["input"]
    if detail["type"] == "extra_forbidden":
        return _unknown_name(model, location)
    if detail["type"] == _RULE:
        return f"{rule}."
    if detail["type"] == "too_short" and (items := _items(model, location)):
        rule += f": name one or more of {', '.join(items)}"
    if len(location) == 2 and _may_be_null(model, location):
        rule += " or null"
    hint = _hint(value, detail) if isinstance(value, str) else ""
    if detail["type"] == "model_type" and isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        hint = " Leave out the dashes."
    return f"is {shown(value)}, but {rule}{_meaning(model, location)}.{hint}"


def _items(model: Model, location: Location) -> tuple[str, ...]:
    """What an option's list may hold, where that is one of a few names."""
    section = section_of(model, location[0])
    field = section.model_fields.get(str(location[-1])) if section is not None else None
    item = get_args(field.annotation)[:1] if field is not None else ()
    return get_args(item[0]) if item and get_origin(item[0]) is Literal else ()


def _hint(text: str, detail: Any) -> str:
    """What a text that is wrong was probably meant to be."""
    if detail["type"] == "model_type" and re.match(r"\w+:\S", text):
        return " Write a space after the colon."
    if re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+)?", text) and detail["type"] in ("int_type", "float_type"):
        return " Leave out the quotes."
    if text.lower() in ("none", "nil") and not detail["type"].startswith("model"):
        return " Did you mean null, without quotes?"
    return did_you_mean(text, _literals(detail))


def _may_be_null(model: Model, location: Location) -> bool:
    section = section_of(model, location[0])
    field = section.model_fields.get(str(location[1])) if section is not None else None
    return field is not None and field.default is None


def _rule(detail: Any) -> str:
    if detail["type"] == _RULE:
        return str(detail["ctx"]["text"])
    if detail["type"] == "literal_error":
        return f"must be {_alternatives(_literals(detail))}"
    if detail["type"] in _RULES:
        return _RULES[detail["type"]]
    text = str(detail["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return text if text.startswith("must ") else f"must be {text}"


def _literals(detail: Any) -> list[str]:
    return re.findall(r"'([^']*)'", str(detail.get("ctx", {}).get("expected", "")))


def _alternatives(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def section_of(model: Model, name: int | str) -> Model | None:
    """The model of a section, or None where there is none of this name."""
    field = model.model_fields.get(str(name))
    return field.annotation if field is not None else None  # type: ignore[return-value]


def _unknown_name(model: Model, location: Location) -> str:
    """What to write instead of a name that does not exist here."""
    word = str(location[-1])[:_MAX_SHOWN].strip().lower().replace("-", "_")
    section = section_of(model, location[0]) if len(location) > 1 else None
    here = list((section or model).model_fields)
    hint = "" if word in here else _place_of(model, word, section is None)
    if not hint and (near := difflib.get_close_matches(word, here, n=1)):
        hint = f" Did you mean {near[0]!r}?"
    elif not hint and (near := difflib.get_close_matches(word, homes := _homes(model), n=1, cutoff=0.75)):
        hint = f" Did you mean {near[0]!r} of section {homes[near[0]]!r}?"
    what = "section" if section is None else "option of this section"
    return f"is no {what}: use {_alternatives(here)}.{hint}"


def _homes(model: Model) -> dict[str, str]:
    """Each option's section."""
    return {option: name for name in model.model_fields for option in section_of(model, name).model_fields}  # type: ignore[union-attr]


def _place_of(model: Model, word: str, at_top: bool) -> str:
    """Where a name that exists belongs, or "" if it exists nowhere."""
    home, _, option = word.rpartition(".")
    home = home or _homes(model).get(option, "")
    section = section_of(model, home)
    if section is not None and option in section.model_fields:
        remedy = f"write it below '{home}:'" if at_top else f"move it to '{home}:'"
        return f" {option!r} is an option of section {home!r}: {remedy}."
    if not at_top and word in model.model_fields:
        return f" {word!r} is a section of its own: do not indent it."
    return ""


def _meaning(model: Model, location: Location) -> str:
    """The option's one line, so that the remedy needs no manual."""
    field = model.model_fields.get(str(location[0])) if location else None
    if field is not None and len(location) > 1:
        field = section_of(model, location[0]).model_fields.get(str(location[1]))  # type: ignore[union-attr]
    return f" ({field.description})" if field is not None and field.description else ""
