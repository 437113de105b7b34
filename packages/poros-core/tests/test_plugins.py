"""Every way in which a plugin can be wrong gives one clear error that names its distribution."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from poros import hookspecs, plugins
from poros.errors import PluginError, UserError
from poros.hookspecs import hookimpl
from poros.interfaces import Architecture, ParityCase, WeightFormat
from poros.plugins import load_plugins, load_registry
from poros.run import Reporter

DOCS = Path(__file__).resolve().parents[3] / "docs" / "plugins.md"
HOOKS = sorted(name for name in dir(hookspecs) if name.startswith("poros_"))


def module(name: str, **functions: Any) -> ModuleType:
    """A plugin module whose functions claim to have been defined in it."""
    made = ModuleType(name)
    for function_name, function in functions.items():
        function.__module__ = name
        function.__name__ = function_name
        setattr(made, function_name, hookimpl(function))
    return made


def returning(values: Any) -> Callable[[], Any]:
    return lambda: values


def raising(error: Exception) -> Callable[[], Any]:
    def hook() -> None:
        raise error

    return hook


def architecture(name: str, *model_types: str) -> type[Architecture]:
    return type("Fake", (Architecture,), {"name": name, "model_types": model_types, "default_targets": ()})


def weight_format(name: str) -> type[WeightFormat]:
    namespace = {"name": name, "claims_bitwise": False, "experimental": True}
    return type("Fake", (WeightFormat,), namespace)


def parity_case(name: str) -> ParityCase:
    return ParityCase(name=name, architecture="fake", make_config=lambda: None, lora={})


def reporter(name: str) -> type[Reporter]:
    return type("Fake", (Reporter,), {"name": name})


class FakeEntryPoint:
    def __init__(self, name: str, distribution: str, load: Callable[[], Any]) -> None:
        self.name, self.dist, self.value, self.load = (
            name,
            SimpleNamespace(name=distribution),
            "fake.plugin",
            load,
        )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the installed plugins by the given entry points."""

    def replace(*entries: FakeEntryPoint) -> None:
        monkeypatch.delenv("POROS_PLUGINS", raising=False)
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: list(entries))

    replace()
    return replace


def make_nothing(*arguments: object, **named: object) -> None:
    """Stands for an assembler; nothing calls it."""


CLAIMS = {
    "poros_register_architectures": (
        architecture("tiny", "t1"),
        architecture("tiny", "t2"),
        "architecture `tiny`",
    ),
    "poros_register_weight_formats": (weight_format("w"), weight_format("w"), "weight format `w`"),
    "poros_register_parity_cases": (parity_case("case"), parity_case("case"), "parity case `case`"),
    "poros_register_reporters": (reporter("r"), reporter("r"), "reporter `r`"),
    "poros_register_commands": (SimpleNamespace(name="go"), SimpleNamespace(name="go"), "command `go`"),
    "poros_register_assemblers": (make_nothing, make_nothing, "assembler `config`"),
}


def collect_everything(extra: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Load and call every hook; returns what each one collected."""
    registry = load_registry(extra)
    return {
        "poros_register_architectures": registry.architectures,
        "poros_register_weight_formats": registry.weight_formats,
        "poros_register_parity_cases": registry.parity_cases(),
        "poros_register_commands": registry.commands(),
        "poros_register_assemblers": registry.assemblers(),
        "poros_register_reporters": registry.reporters(),
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_reaches_the_registry_by_a_real_call(hook: str, install: Callable[..., None]) -> None:
    value = CLAIMS[hook][0]
    collected = collect_everything([("mine", "my-dist", module("mine", **{hook: returning([value])}))])[hook]
    (registered,) = collected.values()
    assert registered.value is value
    assert registered.distribution == "my-dist"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_refuses_a_taken_name_and_names_both_distributions(
    hook: str, install: Callable[..., None]
) -> None:
    first, second, role = CLAIMS[hook]
    extra = [
        ("a", "dist-a", module("a", **{hook: returning([first])})),
        ("b", "dist-b", module("b", **{hook: returning([second])})),
    ]
    with pytest.raises(PluginError, match=f"Two plugins register the {role}: `dist-[ab]` and `dist-[ab]`"):
        collect_everything(extra)


def test_two_plugins_cannot_serve_one_model_type(install: Callable[..., None]) -> None:
    extra = [
        (n, f"dist-{n}", module(n, poros_register_architectures=returning([architecture(n, "shared")])))
        for n in "ab"
    ]
    with pytest.raises(PluginError, match=r"model type `shared`: `dist-[ab]` and `dist-[ab]`"):
        load_registry(extra)


def test_a_misspelt_hook_names_the_distribution_and_the_known_hooks(install: Callable[..., None]) -> None:
    plugin = module("typo", poros_register_architecture=returning([]))
    with pytest.raises(
        PluginError, match=r"distribution `dist-typo` misspells a hook.*poros_register_archi"
    ) as e:
        load_registry([("typo", "dist-typo", plugin)])
    assert all(hook in str(e.value) for hook in HOOKS)


def test_a_hook_without_marker_is_an_error(install: Callable[..., None]) -> None:
    plugin = ModuleType("unmarked")
    exec("def poros_register_commands(): return []", vars(plugin))
    vars(plugin)["poros_register_commands"].__module__ = "unmarked"
    with pytest.raises(
        PluginError, match=r"`dist-unmarked` defines `poros_register_commands` without a marker"
    ):
        load_registry([("unmarked", "dist-unmarked", plugin)])


def test_a_hook_with_unknown_arguments_is_an_error(install: Callable[..., None]) -> None:
    plugin = module("arguments", poros_register_commands=lambda surprise: [])
    with pytest.raises(PluginError, match=r"distribution `dist-x` cannot be registered.*surprise"):
        load_registry([("arguments", "dist-x", plugin)])


def test_a_hook_that_raises_names_the_distribution(install: Callable[..., None]) -> None:
    def broken() -> list[Any]:
        raise RuntimeError("no luck")

    with pytest.raises(PluginError, match=r"of distribution `dist-x` failed: .*RuntimeError: no luck"):
        load_registry([("x", "dist-x", module("x", poros_register_weight_formats=broken))])


def test_loading_plugins_calls_no_hook(install: Callable[..., None]) -> None:
    hooks = {hook: raising(AssertionError("called")) for hook in HOOKS}
    registry = load_plugins([("x", "dist-x", module("x", **hooks))])
    with pytest.raises(PluginError, match="AssertionError: called"):
        _ = registry.weight_formats


@pytest.mark.parametrize("result", [None, 3, [object()]])
def test_a_hook_that_returns_something_else_names_the_distribution(
    result: object, install: Callable[..., None]
) -> None:
    plugin = module("x", poros_register_architectures=returning(result))
    with pytest.raises(PluginError, match="of distribution `dist-x` failed: expected a sequence of arch"):
        load_registry([("x", "dist-x", plugin)])


@pytest.mark.parametrize("error", [ImportError("no module named y"), SystemExit(3), ZeroDivisionError("z")])
def test_a_plugin_that_fails_to_import_is_named(error: BaseException, install: Callable[..., None]) -> None:
    def load() -> None:
        raise error

    install(FakeEntryPoint("mine", "broken-dist", load))
    with pytest.raises(PluginError, match=f"`broken-dist` failed to import.*{type(error).__name__}: {error}"):
        load_registry()


def test_plugins_variable_limits_loading_by_entry_point_or_distribution(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise AssertionError("loaded although left out")

    install(
        FakeEntryPoint("one", "dist-one", lambda: ModuleType("one")),
        FakeEntryPoint("two", "dist-two", lambda: ModuleType("two")),
        FakeEntryPoint("three", "dist-three", fail),
    )
    monkeypatch.setenv("POROS_PLUGINS", "one, dist-two")
    assert [plugin.distribution for plugin in load_registry().plugins] == ["dist-one", "dist-two"]


def test_empty_plugins_variable_loads_none(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeEntryPoint("one", "dist-one", lambda: ModuleType("one")))
    monkeypatch.setenv("POROS_PLUGINS", "")
    assert load_registry().plugins == ()


def test_plugins_variable_that_names_nothing_installed_is_an_error(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeEntryPoint("one", "dist-one", lambda: ModuleType("one")))
    monkeypatch.setenv("POROS_PLUGINS", "one,onne")
    with pytest.raises(PluginError, match=r"expected names among \['dist-one', 'one'\], got \['onne'\]"):
        load_registry()


def test_architecture_for_finds_by_model_type(install: Callable[..., None]) -> None:
    plugin = module("x", poros_register_architectures=returning([architecture("a", "t1", "t2")]))
    registry = load_registry([("x", "dist-x", plugin)])
    found = registry.architecture_for("t2")
    assert found is not None
    assert found.value.name == "a"
    assert registry.architecture_for("t3") is None


def test_plugin_errors_are_the_users_and_exit_2() -> None:
    assert issubclass(PluginError, UserError)
    assert PluginError.exit_code == 2


def test_installed_workspace_loads() -> None:
    loaded = {plugin.distribution for plugin in load_registry().plugins}
    assert {"poros-quant", "poros-arch-qwen", "poros-arch-gemma"} <= loaded


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_its_exact_signature(hook: str) -> None:
    signature = str(inspect.signature(getattr(hookspecs, hook))).replace("'", "")
    assert f"def {hook}{signature}:" in DOCS.read_text()


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_when_it_is_called_and_what_comes_of_duplicates(hook: str) -> None:
    contract = " ".join((getattr(hookspecs, hook).__doc__ or "").split())
    assert "Called once" in contract
    assert "error naming both" in contract


def test_the_training_loop_calls_no_hook() -> None:
    loader = Path(plugins.__file__)
    core = loader.parent
    callers = [p for p in core.rglob("*.py") if p != loader and ".hook." in p.read_text()]
    assert callers == []
