"""Parser of report pages for tests."""

from html.parser import HTMLParser

__all__ = ["Page"]

_VOID = {"meta", "br", "wbr", "img", "path", "polyline", "polygon"}


class Page(HTMLParser):
    """Check the nesting of a page, and collect its tags, text and scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"doubled attribute in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            if self.tags[-1][0] == "wbr" and self.text:  # within a word
                self.text[-1] += data
            else:
                self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())
