"""Templates of strangers are sandboxed and bounded in time and memory; cached rows of strangers are made anew."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from poros_data import DataError, RowSettings, limits, load_dataset
from poros_data.cache import MAGIC, RowCache

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
CANARY = "executed.canary"
ESCAPES = (
    "{{ cycler.__init__.__globals__.os.system('touch executed.canary') }}",
    "{{ lipsum.__globals__['os'].popen('touch executed.canary').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% set x = namespace() %}{{ x.__class__.__base__.__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
)


@pytest.fixture
def render(write: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def read(template: str) -> Any:
        (tmp_path / "template.jinja").write_text(template)
        rows = write(ROW)
        settings = RowSettings(template=str(tmp_path / "template.jinja"))
        return load_dataset(rows, tokenizer, max_length=64, settings=settings)

    return read


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(render: Any, tmp_path: Path, template: str) -> None:
    with pytest.raises(DataError, match=r"The chat template"):
        render(template)
    assert not (tmp_path / CANARY).exists()


def test_a_template_without_end_is_stopped(render: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CPU_SECONDS", 0.2)
    loops = "{% for i in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
    with pytest.raises(DataError, match=r"The chat template was stopped: expected at most 0\.2 s"):
        render(loops)


@pytest.mark.parametrize("template", ["{{ 'a' * 99999999999 }}", "{{ 'a'.center(99999999999) }}"])
def test_a_template_cannot_take_all_memory(render: Any, template: str) -> None:
    with pytest.raises(DataError, match=r"The chat template was stopped: expected memory of at most"):
        render(template)


def test_limits_leave_signals_and_resources_as_they_were() -> None:
    import resource
    import signal

    before = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)
    with limits.bounded_template():
        pass
    assert (signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_template_renders_in_another_thread_without_limits() -> None:
    done: list[int] = []

    def work() -> None:
        with limits.bounded_template():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


@pytest.mark.parametrize(
    "head",
    [
        b"{",
        b"[]",
        b"[" * 100000,
        b"{}",
        b'{"sizes": 1.5, "lines": [], "files": [], "report": {}}',
        b'{"sizes": [-1], "lines": [1], "files": [0], "report": {}}',
        b'{"sizes": [9223372036854775808], "lines": [1], "files": [0], "report": {}}',
        b'{"sizes": [], "lines": [], "files": [], "report": {"sources": "x"}}',
    ],
)
def test_cached_rows_that_this_package_did_not_write_are_made_anew(tmp_path: Path, head: bytes) -> None:
    cache = RowCache(tmp_path)
    payload = len(head).to_bytes(8, "little") + head
    cache.path("key").write_bytes(MAGIC + hashlib.sha256(payload).digest() + payload)
    with pytest.warns(UserWarning, match="damaged and are made anew"):
        assert cache.load("key") is None
