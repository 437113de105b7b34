"""What a damaged or hostile file holds: values for JSON trees, pieces for texts, numbers for bytes."""

from __future__ import annotations

from typing import Any

__all__ = ["CANARY", "ESCAPES", "NUMBERS", "PIECES", "Raw", "evil_values"]

# A file of this name appears beside the inputs where something in them was executed.
CANARY = "executed.canary"


class Raw(str):
    """JSON text that is written as it is: numbers and nestings that Python would not make."""


# Around the borders of what machine integers, sizes and offsets hold.
NUMBERS = (0, 1, -1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)

# Attempts to leave Jinja's sandbox, and templates that are merely absurd. The canary is named relative to the folder
# of the input, which is the working directory.
ESCAPES = (
    "{{ cycler.__init__.__globals__.os.system('touch executed.canary') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__.__builtins__.open('executed.canary', 'w') }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('touch executed.canary').read() }}",
    "{{ joiner.__init__.__globals__.os.system('touch executed.canary') }}",
    "{% set x = namespace() %}{{ x.__class__.__base__.__subclasses__() }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ ('%s{0.__class__.__init__}' | string).format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as secrets %}",
    "{% for i in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3,
    "{{ 'a' * 99999999999 }}",
    "{{ 'a'.center(99999999999) }}",
    "{{ raise_exception('\x1b[31mred\x07') }}",
    "{{ strftime_now('%Y' * 1000) }}",
    "{{ messages.append(1) }}",
    "{% for i in range(99999999) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 1 / 0 }}",
    "{{ messages[99].content }}",
    "{% endfor %}",
    "{% generation %}{% endgeneration %}",
    "{{ messages | tojson(indent=99999) }}",
)

PIECES = (
    "\x00",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202e\u2028\u2029",
    "\ufeff",
    "../../../etc/passwd",
    "/etc/passwd",
    "C:\\windows\\system32",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "]]>--><!--",
    "{{ 7 * 7 }}{% for %}",
    "${jndi:ldap://x}",
    "!!python/object/apply:os.system ['touch executed.canary']",
    "!!python/name:os.system",
    "&a [*a]",
    "<<: *a",
    "? [x]",
    "- - - - ",
    "[" * 3000,
    "{a: " * 3000,
    "9" * 5000,
    "a" * 70000,
    "1e999",
    "0x7fffffffffffffff",
    "1_000",
    "NaN",
    "'",
    '"',
    "\t",
    "\r\n",
    "\u0085",
    "---\n...\n",
    "%YAML 9.9\n---\n",
    "e\u0301" * 50,
    "\U0001f9a5",
)


def evil_values() -> list[Any]:
    """Return values that replace any other in a JSON tree."""
    return [
        *NUMBERS,
        None,
        True,
        False,
        -0.0,
        0.5,
        1e308,
        Raw("NaN"),
        Raw("Infinity"),
        Raw("-Infinity"),
        Raw("1e999"),
        Raw("9" * 400),
        Raw("9" * 5000),
        Raw("[" * 2000 + "]" * 2000),
        Raw("[" * 100000),
        Raw('{"a":' * 2000 + "1" + "}" * 2000),
        "",
        " ",
        "a" * 70000,
        "\ud800",
        *PIECES[:14],
        *ESCAPES[:2],
        [],
        {},
        [[]],
        [None],
        [1] * 20000,
        [2**62] * 5000,
        {"": 1},
        {"__class__": "x"},
        {"a": {"b": {"c": [1, {"d": None}]}}},
    ]
