"""Finds the function to call in a user's module, and its parameters."""

import difflib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

MAX_PARAMETERS, MAX_NAME_CHARS = 100, 100
# The names of functions that a file may use without `entry`.
TRL_NAME, VERL_NAME, OPENRLHF_NAME = "reward", "compute_score", "reward_func"
# By these parameters a function is recognised; functions/arguments.py has their values.
TRL_PARAMETERS = frozenset({"completions", "completion_ids"})
VERL_PARAMETERS = frozenset({"solution_str", "ground_truth"})
VERL_BATCH_PARAMETERS = frozenset({"solution_strs", "ground_truths"})
OPENRLHF_PARAMETERS = frozenset({"queries", "labels"})
ENVIRONMENT_FUNCTIONS = {"reset": ("task",), "step": ("state", "action")}


class UnfitError(Exception):
    """The file holds no function that can be called; the message completes 'the file ...'."""


class SeveralFunctionsError(UnfitError):
    """The file holds more than one function that could be called."""


def find_function(module: types.ModuleType, entry: str | None) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function to call and its signature.

    It is `entry` if set. Otherwise it is `reward`, `compute_score` or `reward_func`, or the only public function of
    the file whose parameters fit.

    Raises:
        UnfitError: There is none.
        SeveralFunctionsError: There is more than one.
    """
    defined = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    if entry is not None:
        if not callable(function := getattr(module, entry, None)):
            raise UnfitError(f"has no function '{entry}'; {_listed(defined)}")
        return function, describe_signature(entry, function)
    named = [name for name in (TRL_NAME, VERL_NAME, OPENRLHF_NAME) if callable(getattr(module, name, None))]
    fitting = named or [name for name, value in defined.items() if _fits(name, value)]
    if len(fitting) > 1:
        raise SeveralFunctionsError(f"holds several reward functions: {', '.join(fitting)}")
    if not fitting:
        hint = ""
        if defined.keys() >= ENVIRONMENT_FUNCTIONS.keys():
            hint = ", as an environment does (kind: environment)"
        elif len(defined) == 1:
            hint = _nearly(*defined.values())
        for name, value in vars(module).items():
            if inspect.isclass(value) and value.__module__ == module.__name__ and "__call__" in vars(value):
                hint = f"; an object of its class {name} can be called: {TRL_NAME} = {name}()"
        raise UnfitError(f"holds no reward function; {_listed(defined)}{hint}")
    function = getattr(module, fitting[0])
    return function, describe_signature(fitting[0], function)


def _listed(defined: Iterable[str]) -> str:
    names = ", ".join(defined)
    return f"it defines {names}" if names else "it defines no function"


def _nearly(function: Callable[..., Any]) -> str:
    """The parameter that is nearly one of a convention's."""
    known = TRL_PARAMETERS | VERL_PARAMETERS | VERL_BATCH_PARAMETERS | OPENRLHF_PARAMETERS
    for name in inspect.signature(function).parameters:
        if name not in known and (near := difflib.get_close_matches(name, known, 1, 0.8)):
            return f"; did you mean '{near[0]}' by '{name}'?"
    return ""


def _fits(name: str, function: Callable[..., Any]) -> bool:
    try:
        return bool(describe_signature(name, function)["takes"])
    except UnfitError:
        return False


def describe_signature(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Convention and parameters of a function: entry, convention, takes, required, takes_any.

    Raises:
        UnfitError: It follows neither convention, or cannot be called by keyword.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = {p.name for p in by_name}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    if len(takes) > MAX_PARAMETERS or any(len(text) > MAX_NAME_CHARS for text in (name, *takes)):
        raise UnfitError(
            f"takes more than {MAX_PARAMETERS} parameters, or a name is longer than {MAX_NAME_CHARS} characters"
        )
    if any(p.kind == p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise UnfitError(f"defines {name}{signature}, whose positional-only parameters cannot be given by name")
    if takes >= VERL_PARAMETERS:
        convention = "verl"
    elif takes >= VERL_BATCH_PARAMETERS:
        convention = "verl_batch"
    elif takes >= OPENRLHF_PARAMETERS:
        convention = "openrlhf"
    elif takes & TRL_PARAMETERS:
        convention = "trl"
    elif takes_any and not takes:
        # A decorator without functools.wraps hides the parameters; only the name is left to go by.
        convention = "verl" if name == VERL_NAME else "trl"
    else:
        raise UnfitError(
            f"defines {name}{signature}, which is neither reward(prompts, completions, **columns), "
            "nor compute_score(data_source, solution_str, ground_truth, extra_info) or its batch form, "
            f"nor reward_func(queries, prompts, labels){_nearly(function)}"
        )
    return {
        "entry": name,
        "convention": convention,
        "takes": sorted(takes),
        "required": [p.name for p in by_name if p.default is p.empty],
        "takes_any": takes_any,
    }


def find_environment(module: types.ModuleType, entry: str | None) -> tuple[dict[str, Callable[..., Any]], str]:
    """reset and step of a module, or of its object or class `entry`; and that name.

    Raises:
        UnfitError: One of them is missing or takes other parameters.
    """
    holder: Any = module
    if entry is not None:
        holder = getattr(module, entry, None)
        if holder is None:
            raise UnfitError(f"has no '{entry}'")
        holder = holder() if inspect.isclass(holder) else holder
    functions = {}
    for name, parameters in ENVIRONMENT_FUNCTIONS.items():
        function = getattr(holder, name, None)
        if not callable(function):
            raise UnfitError(f"is not an environment: {entry or 'the module'} has no {name}({', '.join(parameters)})")
        try:
            inspect.signature(function).bind(**dict.fromkeys(parameters))
        except TypeError as error:
            raise UnfitError(f"defines {name}{inspect.signature(function)}, not ({', '.join(parameters)})") from error
        functions[name] = function
    return functions, entry or ""
