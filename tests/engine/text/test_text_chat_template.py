"""Chat templates render as in transformers, and are sure to end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.demo import MODEL_DIR
from penstock.engine.errors import EngineError, InvalidRequest
from penstock.engine.sandbox import sandbox
from penstock.engine.text import chat_template
from penstock.engine.text.chat_template import ChatTemplate
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE, byte_level
from tests.support.patience import WAIT_S

CHAT = [
    {"role": "system", "content": " Be  brief.\n"},
    {"role": "user", "content": 'Äther & <b>"5 > 3"</b> 🛁\u2028 {{ 7 * 7 }} <|end|>'},
    {"role": "assistant", "content": "</think>\n\nok"},
    {"role": "user", "content": ""},
]

TEMPLATES = {
    "of the tests": CHAT_TEMPLATE,
    "of the demo model": (MODEL_DIR / "chat_template.jinja").read_text(),
    "blocks are trimmed": "{% for m in messages %}\n    {% if loop.first %}\n  a\n  {%- endif %}\n{{ m.role }}\n"
    "{% endfor %}\n",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys(['x', 'y'], 0) }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}"
    "{% endgeneration %}{% endfor %}{{ x }}",
    "macro": "{%- macro show(m, deep=false) -%}[{{ m.role | upper }}{{ show(m, false) if deep }}]{%- endmacro -%}"
    "{% for m in messages %}{{ show(m, true) }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m['content'].strip().split('>')[-1].lstrip('\\n') }}{{ m.items() | list }}"
    "{{ m.get('name', 'nobody') }}{% endfor %}{{ messages[1:][::-1] | map(attribute='role') | join(',') }}",
    "tests and filters": "{{ tools is none }}{{ tools is defined }}{{ enable_thinking is defined }}{{ documents }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[0].content | trim | e }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ eos_token_id }}{{ add_generation_prompt }}",
    "undefined": "{{ messages[0].name }}{{ nothing }}{% if messages[9] is defined %}a{% endif %}",
    "sandbox": "{{ ''.__class__ }}",
    "year": "{{ strftime_now('%Y') }}",
}  # fmt: skip

REFUSED: dict[str, tuple[str, str]] = {
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "failed: it takes more than 2 s",
    ),
    "in one operation": ("{{ (7 ** 100000000) % 10 }}", "failed: it takes more than 2 s"),
    "10^9 characters at once": ("{{ messages[0].content * 10 ** 9 }}", r"failed: it needs more than \d+ MiB"),
    "10^9 characters when compiled": ("{{ 'x' * 10 ** 9 }}", r"failed: it needs more than \d+ MiB"),
    "10^9 characters in pieces": (
        "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
        r"failed: it makes more than \d+ characters",
    ),
    "width of a format": ("{{ '%1000000000d' % 1 }}", r"failed: it needs more than \d+ MiB"),
    "list that doubles": (
        "{% set n = namespace(a=['x']) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
        r"failed: it needs more than \d+ MiB",
    ),
    "range": ("{{ range(10 ** 9) | list }}", "failed: OverflowError: Range too big"),
    "division": ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
    "overflow": ("{{ 2.0 ** 10000 }}", "failed: OverflowError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: RecursionError"),
    "recursion of the parser": ("{{" + "(" * 10**5 + "}}", "failed: RecursionError"),
    "json that holds itself": (
        "{% set n = namespace(a={}) %}{% set _ = n.a.update({'a': n.a}) %}{{ n.a | tojson }}",
        "failed: SecurityError",
    ),
    "its own message": ("{{ raise_exception('one user turn, please') }}", "refuses these messages: one user turn, pl"),
    "long message": ("{{ raise_exception('x' * 10 ** 6) }}", "refuses these messages: x{500}$"),
    "syntax": ("{% if %}", "failed: TemplateSyntaxError"),
    "undefined": ("{{ nothing.at_all }}", "failed: UndefinedError: 'nothing' is undefined"),
    "underscore": ("{% set n = namespace(_a=1) %}", "failed: SecurityError"),
    "underscore set later": ("{% set n = namespace() %}{% set n._a = 1 %}", "failed: SecurityError"),
    "type": ("{{ messages + 1 }}", "failed: TypeError"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", "failed: SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "failed: TypeError"),
}


def render(template: ChatTemplate, content: str = "hello") -> str:
    return template.render({"messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str) -> None:
    tokenizer = byte_level(chat_template=TEMPLATES[name], bos_token="<|start|>")
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    variables: dict[str, Any] = {"messages": CHAT, "tools": None, "documents": None, "add_generation_prompt": True}
    assert ChatTemplate(TEMPLATES[name]).render({**tokenizer.special_tokens_map, **variables}) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_a_template_does_ends_as_a_refusal(name: str) -> None:
    template, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message):
        render(ChatTemplate(template))


@pytest.mark.parametrize(
    ("now_s", "shown"),
    [
        (951_782_399.9, "28 Feb 2000, 23:59:59 "),
        (951_782_400.0, "29 Feb 2000, 00:00:00 "),
        (-5.0, "01 Jan 1970, 00:00:00 "),
        (2.0**64, "01 Jan 9999, 00:00:00 "),
    ],
)
def test_the_present_is_what_the_caller_says_on_every_machine(
    monkeypatch: pytest.MonkeyPatch, now_s: float, shown: str
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    template = ChatTemplate("{% macro now() %}{{ strftime_now('%d %b %Y, %H:%M:%S %Z') }}{% endmacro %}{{ now() }}")
    assert template.render({}, now_s=now_s) == shown


def test_what_follows_a_refusal_is_rendered() -> None:
    looping = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(
        "{% set c = messages[0].content %}{% if c == 'loop' %}" + looping + "{% elif c == 'large' %}{{ c * 10 ** 9 }}"
        "{% elif c == 'zero' %}{{ 1 // 0 }}{% endif %}{{ c }}"
    )
    assert render(template) == "hello"
    for content in ("loop", "large", "zero"):
        with pytest.raises(InvalidRequest, match="chat template failed"):
            render(template, content)
        assert render(template, f"after {content}") == f"after {content}"


def test_while_one_is_rendered_another_is_too() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert render(template) == "hello"
    (process,) = template._sandbox._idle
    os.kill(pid_of(process), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(render, template, "slow")
        eventually(lambda: not template._sandbox._idle)
        assert render(template, "quick") == "quick"
        assert not slow.done()
        os.kill(pid_of(process), signal.SIGCONT)
        assert slow.result() == "slow"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_was_killed_is_replaced(number: signal.Signals) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert render(template) == "hello"
    (process,) = template._sandbox._idle
    os.kill(pid_of(process), number)
    assert render(template) == "hello"
    assert not is_running(pid_of(process))


def test_when_all_processes_were_killed_no_request_is_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    template._sandbox._idle += [template._sandbox._new() for _ in range(2)]
    for process in template._sandbox._idle:
        os.kill(pid_of(process), signal.SIGKILL)
    assert render(template) == "hello"


def test_a_process_that_has_grown_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for replaced in (False, True):
        template = ChatTemplate("{{ messages[0].content }}")
        assert render(template) == render(template) == "hello"
        assert bool(template._sandbox._idle) is not replaced
        monkeypatch.setattr(chat_template, "BOUNDS", replace(chat_template.BOUNDS, max_idle_bytes=2**20))


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert render(template) == "hello"
    (process,) = template._sandbox._idle
    monkeypatch.setattr(sandbox, "PATIENCE_S", 0.5)
    os.kill(pid_of(process), signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match=r"no answer within 0\.5 s"):
        render(template, "x" * 10**6)
    assert not is_running(pid_of(process))


def test_a_program_that_does_not_start_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_PROGRAM", Path("/no/such/program.py"))
    with pytest.raises(EngineError, match="ended with status 1") as caught:
        render(ChatTemplate("x"))
    assert not isinstance(caught.value, InvalidRequest)


def test_processes_end_with_their_owner() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert render(template) == "hello"
    (process,) = template._sandbox._idle
    pid = pid_of(process)
    assert is_running(pid)
    del template, process
    gc.collect()
    assert not is_running(pid)


OWNER = """
from penstock.engine.text.chat_template import ChatTemplate
template = ChatTemplate("{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}")
template.render({"n": 0})
print(template._sandbox._idle[0]._process.pid, flush=True)
template.render({"n": 99999})
"""


def test_a_killed_owner_leaves_no_process_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    eventually(lambda: not is_running(pid))  # at once, or when its time is used up


BOUND = """
import resource
from penstock.engine.text.chat_template import ChatTemplate
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
print(ChatTemplate("{{ said }}").render({"said": "hello"}))
"""


def test_a_worker_whose_own_memory_is_bounded_renders() -> None:
    """Processes of such a worker may not raise a hard limit (`ulimit -v`, systemd's LimitAS)."""
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("hello\n", "")


def test_no_secret_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    template = ChatTemplate("{{ messages[0].content }}")
    assert render(template) == "hello"
    variables = Path(f"/proc/{pid_of(template._sandbox._idle[0])}/environ").read_bytes()
    assert b"secret" not in variables
    assert b"PATH=" in variables


def test_text_that_is_not_valid_unicode_comes_through() -> None:
    assert render(ChatTemplate("{{ messages[0].content }}{{ '\\ud800' }}"), "é\udfff") == "é\udfff\ud800"


def pid_of(process: sandbox._Process) -> int:
    return process._process.pid


def is_running(pid: int) -> bool:
    """Checks whether a process runs. Zombies, which another process has to wait for, have ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)
