"""Replace ``torch.compile`` by one that checks what it compiles, in a test run or in a whole program."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from checked_backend import autostart
from checked_backend._torch.dynamo import ahead_of_time, default_backend, lookup_backend, same_config
from checked_backend._torch.given_backends import choose_given_backends
from checked_backend._torch.inductor import aot_inductor
from checked_backend.backends import debug_interpreter, graph_dumper, nop, numcheck
from checked_backend.findings import Skip
from checked_backend.options import CheckOptions, RunOptions, environment_variable, parse_options
from checked_backend.regions.compile import resolve_compiler
from checked_backend.report.session import Session

Compile = Callable[..., Any]

_SELF_CHECKING = (nop, debug_interpreter, graph_dumper)


@dataclass(frozen=True, slots=True)
class Settings:
    """How ``torch.compile`` is checked: with which backend where the code names none, and options of ``numcheck``.

    Options in the environment apply as well.
    """

    compiler: str | Callable[..., Any] = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    enabled: bool = True


class CheckingBackend:
    """A Dynamo backend that has a watch compile each region, with another backend, and check it.

    Two of them are equal if they check equal backends, as with torch's own wrappers. Dynamo then reuses code that it
    compiled for the other. The other backend is the option ``compiler``; the mode is Inductor's.
    """

    compiler_name = "numcheck"

    def __init__(self, watch: CompileWatch, options: Mapping[str, Any], mode: str | None) -> None:
        self._watch = watch
        self._options = options
        self._mode = mode

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckingBackend):
            return NotImplemented
        return (self._options, self._mode) == (other._options, other._mode)

    def __hash__(self) -> int:
        return hash((type(self), self._mode))

    def __deepcopy__(self, _memo: Any) -> CheckingBackend:
        return self  # a copy of a compiled module is compiled as the module is

    def __reduce__(self) -> tuple[Any, ...]:
        return restored_backend, (self._options, self._mode)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_kwargs: Any) -> Callable[..., Any]:
        """Compile a region."""
        return self._watch.region(gm, example_inputs, self._options, self._mode)


class CompileWatch:
    """Replaces ``torch.compile`` while checks are on. A subclass says which session records the findings.

    Args:
        forced: Options of ``numcheck`` that override all others.
        defaults: Options that apply if neither the settings nor the environment have them.
        began_with: Options that the environment had when the process began. They apply as long as it says nothing else:
            a program may clear it.
    """

    def __init__(
        self,
        *,
        forced: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        began_with: Mapping[str, str] | None = None,
    ) -> None:
        self._forced = forced or {}
        self._began_with = began_with or {}
        checks = {name: value for name, value in self._began_with.items() if name in CheckOptions.model_fields}
        self._defaults = {**(defaults or {}), **checks}
        self._everything = ExitStack()
        self._settings: list[Settings] = []

    def check_everything(self, compiler: str) -> None:
        """Check ``torch.compile`` from now on, until `close`, with this backend if the code names none."""
        if not self._settings:
            self._everything.enter_context(self.using(Settings(compiler)))

    def validate(self) -> None:
        """Raise an OptionError if an option in the environment, or the compiler, is unknown."""
        now = self._now()
        resolve_compiler(parse_options(CheckOptions, "numcheck", {**now.options, "compiler": now.compiler}))

    def check_run(self) -> RunOptions:
        """Check this process, whose ``torch.compile`` `checking` wraps.

        Its options are those in the environment, and those that it had when the process began; an OptionError if one is
        bad.
        """
        gone = {name: value for name, value in self._began_with.items() if environment_variable(name) not in os.environ}
        options = parse_options(RunOptions, "numcheck", gone)
        self._settings.append(Settings(options.compiler))
        self.validate()
        return options

    def close(self) -> None:
        """Put the original ``torch.compile`` back."""
        self._everything.close()
        self._settings.clear()

    @contextmanager
    def using(self, settings: Settings) -> Iterator[None]:
        """Check what ``torch.compile`` compiles inside of the block."""
        with ExitStack() as at_end:
            if not self._settings:
                at_end.callback(setattr, torch, "compile", torch.compile)
                torch.compile = self.checking(torch.compile)
                at_end.callback(choose_given_backends(self.chosen))
            self._settings.append(settings)
            at_end.callback(self._settings.pop)
            yield

    def current(self) -> Session | None:
        """A session that should record a call, but is not active; None if there is none."""
        return None

    def asked(self) -> None:
        """Note that the program calls ``torch.compile``. The result will be checked."""

    def left_unchecked(self, skip: Skip) -> None:
        """Note something that the program compiles, and that is not checked."""

    def region(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any], mode: str | None
    ) -> Callable[..., Any]:
        """Compile a region of the program, and check it on every call."""
        region = numcheck(gm, example_inputs, options=options, mode=mode)

        def run(*args: Any) -> Any:
            session = self.current()
            if session is None:
                return region(*args)
            with session.entered():
                return region(*args)

        return run

    def compiled(self, _model: Any, made: Any, _compile_again: Callable[..., Any]) -> Any:
        """The object that the program gets of what ``torch.compile`` has made; the last compiles a copy alike."""
        return made

    def checking(self, original: Compile) -> Compile:
        """Wrap a ``torch.compile`` so that it checks what it compiles."""

        @functools.wraps(original)
        def compile_checked(model: Any = None, **kwargs: Any) -> Any:
            settings = self._now()
            if kwargs.get("backend") is None and (default := default_backend()) != "inductor":
                kwargs["backend"] = default  # the program has set it for all of its code
            if model is None:  # used as a decorator with arguments
                return lambda decorated: compile_checked(decorated, **kwargs)
            off = not self._settings or not settings.enabled or kwargs.get("disable")
            if off or _asked_by_this_package():
                return original(model, **kwargs)
            backend = kwargs.get("backend")
            if _checks_itself(backend) or type(backend).__module__.startswith("vllm."):  # its plugin checks the pieces
                self.asked()
                return original(model, **kwargs)
            given = _own_options(kwargs)
            plain = original(lambda: None, **kwargs)  # arguments that torch refuses raise here, as they would unchecked
            self.asked()
            redirected = self._redirected(settings, given)

            def compile_again(copy: Callable[..., Any], *, fresh: bool = False) -> Any:
                backend = redirected["backend"]  # Dynamo takes another object for another backend, and compiles again
                chosen = (lambda *graph: backend(*graph)) if fresh else backend
                return original(copy, **_own_options({**redirected, "backend": chosen}))

            made = compile_again(model)
            same_config(made, plain)
            ahead_of_time(made, lambda: self._compiled_ahead(model, original(model, **_own_options(given))))
            return self.compiled(model, made, compile_again)

        compile_checked.restored_backend = functools.partial(CheckingBackend, self)  # type: ignore[attr-defined]
        return compile_checked

    def chosen(self, backend: str | Callable[..., Any]) -> str | Callable[..., Any]:
        """The backend to use in place of one that the program hands to Dynamo without ``torch.compile``."""
        settings = self._now()
        if not self._settings or not settings.enabled or _checks_itself(backend):
            return backend
        self.asked()
        checking: Callable[..., Any] = self._redirected(settings, {"backend": backend})["backend"]
        return checking

    def _compiled_ahead(self, model: Any, plain: Any) -> Any:
        name = getattr(model, "__qualname__", type(model).__qualname__)
        why = "compiled ahead of time (aot_compile), which is not checked; checked_backend.check compares it in a call"
        self.left_unchecked(Skip(str(name), why, matters=True))
        return plain

    def _now(self) -> Settings:
        return self._settings[-1] if self._settings else Settings()

    def _redirected(self, settings: Settings, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ``torch.compile``, with the backend they name replaced by one that checks it."""
        rest = {name: value for name, value in kwargs.items() if name not in ("backend", "mode", "options")}
        backend, mode = kwargs.get("backend"), kwargs.get("mode")
        given = dict(kwargs.get("options") or {})
        if "guard_filter_fn" in given:  # an option of Dynamo, not of the backend
            rest["options"] = {"guard_filter_fn": given.pop("guard_filter_fn")}
        if backend is None:
            backend = settings.compiler
            if backend != "inductor":  # mode and options are Inductor's; another backend compiles this
                mode, given = None, {}
        if given.pop("use_aoti", False) and backend == "inductor":  # torch.compile chooses it, no backend does
            backend, mode, given = aot_inductor(mode, given, kwargs.get("dynamic")), None, {}
        if backend != "inductor" and mode is not None:
            compiler: Any = lookup_backend(backend) if isinstance(backend, str) else backend
            backend, mode = functools.partial(compiler, mode=mode), None
        options = {**settings.options, **self._forced}
        for name, value in self._defaults.items():
            if environment_variable(name) not in os.environ:
                options.setdefault(name, value)
        options["compiler_options"] = {**options.get("compiler_options", {}), **given}
        return {**rest, "backend": CheckingBackend(self, {**options, "compiler": backend}, mode)}


def restored_backend(options: Mapping[str, Any], mode: str | None) -> Any:
    """The backend of a compiled module that was pickled in a checked program.

    It is the one that the code named, which is the option ``compiler``, and a checking one if this process is checked.
    """
    checking = getattr(torch.compile, "restored_backend", None)
    made = None if checking is None else checking(options, mode)
    return made or resolve_compiler(parse_options(CheckOptions, "numcheck", options), mode)


def _own_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``torch.compile`` in which ``options`` are the backend's alone."""
    options = kwargs.get("options")
    return {**kwargs, "options": dict(options)} if options else dict(kwargs)


def _checks_itself(backend: Any) -> bool:
    """Whether the backend is a checking one of this package. Such a backend is not checked in turn."""
    while isinstance(backend, functools.partial):
        backend = backend.func
    if backend == "numcheck":
        return True
    ours = str(getattr(backend, "__module__", "")).partition(".")[0] == "checked_backend"
    return ours and backend not in _SELF_CHECKING


def _asked_by_this_package() -> bool:
    """Whether a check called ``torch.compile``, for example to find the stage at which a finding first shows."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, autostart.__name__):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("checked_backend.")
