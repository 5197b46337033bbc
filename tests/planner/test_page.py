"""The page of a plan: whole, self-contained, and shown by a browser as it is meant."""

import re
import shlex
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from dcpjax.cli import main
from dcpjax.planner.page import render_page
from dcpjax.planner.sections import Section
from tests.planner.browser import PROGRAM, Browser, running_browser
from tests.planner.test_search import parse

PLAN = ["plan", "glm-5.2", "--device", "h200", "--num-devices", "16", "--context", "1M"]
FIGURES = ["frontier", "capacity by dcp", "time per token by context", "reshard", "transfer time"]


class Page(HTMLParser):
    """Balanced tags, what the page asks for, and its commands."""

    VOID = {"meta", "br", "img", "link"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.asked: list[str] = []
        self.commands: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append(tag)
        self.asked += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.commands.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.html"
    options = ["--html", str(file), "--plots", str(file.parent / "plots")]
    result = CliRunner().invoke(main, [*PLAN, *options])
    assert result.exit_code == 0, result.output
    return file


def test_the_page_is_whole_and_asks_for_nothing(page: Path):
    text = page.read_text()
    reader = Page(text)
    assert reader.open == []
    assert "script" not in reader.seen and reader.seen.count("svg") == len(FIGURES)
    assert all(value.startswith(("#", "data:")) for value in reader.asked)  # in the pictures
    assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_commands_of_the_page_are_taken_by_a_shell(page: Path):
    commands = Page(page.read_text()).commands
    assert len(commands) >= 3 and all(command.count("\n") for command in commands)
    for command in commands:
        parse(shlex.join(word for word in shlex.split(command) if word != "\n"))


def test_pictures_are_files_too(page: Path):
    names = {path.name for path in (page.parent / "plots").iterdir()}
    assert names == {name.replace(" ", "_") + ".svg" for name in FIGURES}


def test_columns_of_numbers_are_flush_right():
    rows = (("TP8", "1,024", "-0.5%", "3.2 of 8"), ("DP8", "7", "+12.0%", "12 of 31"))
    section = Section("A <title>", ("engine", "tokens", "more", "batch"), rows)
    text = render_page("T & U", [section, Section("empty", ("a", "b"))], {})
    assert text.count('<td class="number">') == 6 and "<td>TP8</td>" in text
    assert '<th scope="col" class="number">tokens</th>' in text
    assert "A &lt;title&gt;" in text and "T &amp; U" in text


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if shutil.which(PROGRAM) is None:
        pytest.skip("Chromium is not installed here; the page is checked as text as well")
    with running_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_all_figures_and_nothing_leaves_the_page(page, browser, width):
    """On a phone as on a desk: no message, no request, nothing wider than the window."""
    shown = browser.show(page.as_uri(), width)
    assert shown.messages == []
    own = [url for url in shown.requests if not url.startswith("data:")]
    assert own == [page.as_uri()]
    assert [figure["name"] for figure in shown.figures] == FIGURES
    for figure in shown.figures:
        assert 200 < figure["width"] <= width and figure["height"] > 100
        assert figure["drawn"] > 50
    assert shown.width <= width
    assert "Verdict" in shown.text and "dcpjax router" in shown.text


def test_a_page_that_asks_and_complains_is_found(tmp_path, browser):
    """The test above can fail."""
    file = tmp_path / "bad.html"
    file.write_text(
        '<body><div style="width: 3000px">x</div><img src="missing.png">'
        "<script>console.error('no'); undefined_name()</script></body>"
    )
    shown = browser.show(file.as_uri(), 800)
    assert len(shown.messages) >= 2 and shown.width >= 3000 and shown.figures == []
    assert any(url.endswith("missing.png") for url in shown.requests)
