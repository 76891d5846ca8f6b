"""What a terminal is shown."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eval.results import Score
from eval.terminal_table import printable, score_table


@given(st.text())
def test_what_is_printable_shows_as_it_is_and_nothing_else_reaches_the_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


def test_names_cannot_command_the_terminal() -> None:
    name = "a\x1b[2J[red]\x07\x9bé"
    score = Score(dataset=name, task="zero-shot", metric="acc1", setting=name, value=0.5, n=3)
    out = io.StringIO()
    Console(file=out, width=200).print(score_table([score]))
    assert out.getvalue().count("a\\x1b[2J[red]\\x07\\x9bé") == 2
    assert out.getvalue().replace("\n", "").isprintable()
