"""Loading plugins and collecting what they register into one registry object that is passed around."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy

from poros import hookspecs
from poros.errors import PluginError, explain

if TYPE_CHECKING:
    from poros.interfaces import Architecture, ParityCase, RunAssembler, WeightFormat
    from poros.run.events import Reporter

__all__ = ["ENTRY_POINT_GROUP", "Registered", "Registry", "load_plugins", "load_registry"]

ENTRY_POINT_GROUP = "poros"
PLUGINS_VARIABLE = "POROS_PLUGINS"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registered(Generic[T]):
    """A registered value and the distribution that brought it."""

    value: T
    distribution: str


@dataclass(frozen=True, slots=True)
class Plugin:
    """One loaded entry point."""

    name: str
    distribution: str
    module: Any


@dataclass(frozen=True)
class Registry:
    """Everything the loaded plugins registered, by declared name. A hook is called when its values are first asked for.

    Raises:
        PluginError: from whatever asks: a hook failed, or two plugins claim one name.
    """

    plugins: tuple[Plugin, ...]
    _manager: pluggy.PluginManager

    @cached_property
    def architectures(self) -> Mapping[str, Registered[type[Architecture]]]:
        """The architecture classes by name; no two serve one model type."""
        found = _collect(self._manager, "poros_register_architectures", lambda a: [a.name], "architecture")
        _reject_shared_model_types(found.values())
        return found

    @cached_property
    def weight_formats(self) -> Mapping[str, Registered[type[WeightFormat]]]:
        """The weight format classes by name."""
        return _collect(self._manager, "poros_register_weight_formats", lambda f: [f.name], "weight format")

    def architecture_for(self, model_type: str) -> Registered[type[Architecture]] | None:
        """Return the architecture that serves ``model_type``, or None."""
        for registered in self.architectures.values():
            if model_type in registered.value.model_types:
                return registered
        return None

    def parity_cases(self) -> Mapping[str, Registered[ParityCase]]:
        """Call the parity hook and return the cases by name."""
        return _collect(self._manager, "poros_register_parity_cases", lambda case: [case.name], "parity case")

    def commands(self) -> Mapping[str, Registered[Any]]:
        """Call the command hook and return the click commands by name."""
        return _collect(self._manager, "poros_register_commands", lambda command: [command.name], "command")

    def assemblers(self) -> Mapping[str, Registered[RunAssembler]]:
        """Call the assembler hook and return what makes trainers from configs; there is one at most."""
        return _collect(self._manager, "poros_register_assemblers", lambda made: ["config"], "assembler")

    def reporters(self) -> Mapping[str, Registered[type[Reporter]]]:
        """Call the reporter hook and return the reporter classes by name."""
        return _collect(self._manager, "poros_register_reporters", _reporter_names, "reporter")


def load_registry(extra: Iterable[tuple[str, str, Any]] = ()) -> Registry:
    """Load every entry point of the group and return what they register.

    ``POROS_PLUGINS=a,b`` limits loading to the named entry points or distributions.

    Args:
        extra: (entry point name, distribution, module) of plugins that are not installed, for tests.

    Raises:
        PluginError: a plugin fails to import, misspells a hook, or claims a taken name; an entry of
            ``POROS_PLUGINS`` names nothing installed.
    """
    registry = load_plugins(extra)
    # What every run needs is complained about here, not in the middle of one.
    _ = registry.architectures, registry.weight_formats
    return registry


def load_plugins(extra: Iterable[tuple[str, str, Any]] = ()) -> Registry:
    """Return the registry as `load_registry` does, before any hook is called: the command line has to be quick.

    Raises:
        PluginError: a plugin fails to import or misspells a hook, or ``POROS_PLUGINS`` names nothing installed.
    """
    manager = pluggy.PluginManager("poros")
    manager.add_hookspecs(hookspecs)
    loaded: list[Plugin] = []
    for entry_name, distribution, module in [*_installed(), *extra]:
        if manager.has_plugin(f"{distribution}:{entry_name}"):
            continue
        loaded.append(Plugin(entry_name, distribution, module))
        _check_hook_markers(module, entry_name, distribution)
        try:
            manager.register(module, name=f"{distribution}:{entry_name}")
        except (ValueError, pluggy.PluginValidationError) as error:
            raise PluginError(
                f"Plugin `{entry_name}` of distribution `{distribution}` cannot be registered: {_one_line(error)}. "
                f"Correct the plugin's hooks (docs/plugins.md) or its entry points."
            ) from error
    _check_hook_names(manager)
    return Registry(tuple(loaded), manager)


def _installed() -> list[tuple[str, str, Any]]:
    entry_points = {
        (entry.name, entry.dist.name if entry.dist else "unknown"): entry
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    }
    wanted = os.environ.get(PLUGINS_VARIABLE)
    if wanted is not None:
        names = {name.strip() for name in wanted.split(",") if name.strip()}
        known = {name for key in entry_points for name in key}
        if missing := sorted(names - known):
            raise PluginError(
                explain(
                    f"Cannot limit plugins by `{PLUGINS_VARIABLE}`",
                    expected=f"names among {sorted(known)}",
                    got=missing,
                    next_step=f"Correct `{PLUGINS_VARIABLE}` or install the distribution that it names",
                )
            )
        entry_points = {key: entry for key, entry in entry_points.items() if names & set(key)}
    modules = []
    for (name, distribution), entry in sorted(entry_points.items()):
        try:
            modules.append((name, distribution, entry.load()))
        except (Exception, SystemExit) as error:  # a plugin may fail in any way while it is imported
            raise PluginError(
                f"Plugin `{name}` of distribution `{distribution}` failed to import `{entry.value}`: "
                f"{type(error).__name__}: {error}. Repair or uninstall `{distribution}`, or leave it out with "
                f"`{PLUGINS_VARIABLE}=...`."
            ) from error
    return modules


def _check_hook_markers(module: Any, entry_name: str, distribution: str) -> None:
    """Refuse a ``poros_*`` function without ``@hookimpl``: pluggy would pass over it in silence."""
    for name, value in vars(module).items():
        own = inspect.isfunction(value) and value.__module__ == module.__name__
        if own and name.startswith("poros_") and not hasattr(value, "poros_impl"):
            raise PluginError(
                f"Plugin `{entry_name}` of distribution `{distribution}` defines `{name}` without a marker, so it "
                f"would never be called. Decorate it with `@poros.hookspecs.hookimpl`."
            )


def _check_hook_names(manager: pluggy.PluginManager) -> None:
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        distribution, entry_name = (manager.get_name(error.plugin) or "unknown:unknown").split(":", 1)
        raise PluginError(
            f"Plugin `{entry_name}` of distribution `{distribution}` misspells a hook: {_one_line(error)}. "
            f"Known hooks: "
            f"{', '.join(sorted(name for name in dir(hookspecs) if name.startswith('poros_')))}."
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _collect(
    manager: pluggy.PluginManager, hook_name: str, keys: Any, role: str
) -> Mapping[str, Registered[Any]]:
    found: dict[str, Registered[Any]] = {}
    for implementation in getattr(manager.hook, hook_name).get_hookimpls():
        distribution = implementation.plugin_name.split(":")[0]
        try:
            entries = [(key, value) for value in implementation.function() for key in keys(value)]
        except Exception as error:  # a plugin's hook may fail in any way
            raise PluginError(
                f"`{hook_name}` of distribution `{distribution}` failed: expected a sequence of {role}s, got "
                f"{type(error).__name__}: {error}. Repair or uninstall `{distribution}`, or leave it out with "
                f"`{PLUGINS_VARIABLE}=...`."
            ) from error
        for key, value in entries:
            if key in found:
                raise PluginError(
                    f"Two plugins register the {role} `{key}`: `{found[key].distribution}` and "
                    f"`{distribution}`. Uninstall one, or leave it out with `{PLUGINS_VARIABLE}=...`."
                )
            found[key] = Registered(value, distribution)
    return MappingProxyType(found)


def _reporter_names(value: Any) -> list[str]:
    from poros.run.events import Reporter  # not before a run asks: it imports the training loop

    if not (isinstance(value, type) and issubclass(value, Reporter) and value.name):
        raise TypeError(f"{value!r} is not a subclass of `poros.Reporter` with a `name`")
    return [value.name]


def _reject_shared_model_types(architectures: Iterable[Registered[type[Architecture]]]) -> None:
    owner: dict[str, str] = {}
    for registered in architectures:
        for model_type in registered.value.model_types:
            if model_type in owner:
                raise PluginError(
                    f"Two plugins serve the model type `{model_type}`: `{owner[model_type]}` and "
                    f"`{registered.distribution}`. Uninstall one, or leave it out with `{PLUGINS_VARIABLE}=...`."
                )
            owner[model_type] = registered.distribution
