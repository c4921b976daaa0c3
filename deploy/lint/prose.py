"""Check the project's prose by the rules of prose.toml: sentence length, forbidden words, constructions.

It reads markdown, docstrings, comments and the product's messages, never code. A paragraph of markdown is one line.

prose_allowed.tsv has the number of alerts that a module may still have. More fail, and fewer fail too, so that the
numbers only fall. A file that is not in it has none.

- FILE...: print every alert of these files. Without a file: check all files of the kinds in CHECKED.
- --counts: print words and alerts of each file.
- --allow: lower the allowed numbers to the present ones, of all files.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
RULES = tomllib.loads(Path(__file__).with_name("prose.toml").read_text())
MESSAGES = ("services/", "gspo_core/", "deploy/")  # their string literals are messages to people
ALLOWED = Path(__file__).with_name("prose_allowed.tsv")
CHECKED = re.compile(r"\.(md|md\.j2|ya?ml|toml|sh|proto)$|(?<!_pb2)(?<!_grpc)\.py$|(^|/)(Makefile|Dockerfile)$")
STANDS_FOR = {"code_inline": "`x`", "softbreak": "\n", "hardbreak": " "}
MARKDOWN = MarkdownIt("commonmark").enable("table")
CODE = re.compile(r"`[^`]*`|\{\{.*?\}\}|https?://\S+")
NAMES = re.compile(r"`x`(?:(?:,| and| or|, and|, or) `x`)+")  # a list of names counts as one word
TEMPLATE = re.compile(r"\{%.*?%\}")
WORD = re.compile(r"[^\W_][\w'./%-]*|`x`")
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[\"')*]*\s+(?=[\W_]*[A-Z0-9`])")
DOCSTRING_BREAK = re.compile(r"(\n\s*\n|\n(?=\s*(?:(?:[-*]|\d\.) |[\w*]+(?:, [\w*]+)*: |[A-Z]\w+:\n)))")
FIVE_WORDS = re.compile(r"(?s)^(?!.*(?:redis\.|\nlocal |\w\(\)|</|=\n))(?:.*?[A-Za-z]{2,} ){4}")
DIRECTIVE = re.compile(r"(type: |noqa|fmt: |pragma|ruff|!/)")
PREFORMATTED = re.compile(r"(#|//) {3}")

Text = tuple[int, str]  # the first line, and a paragraph, heading, item, cell, comment or message


def markdown_texts(source: str) -> Iterator[Text]:
    """Yield the inline texts, with code spans between backticks; code blocks and HTML are left out."""
    line = 0
    for token in MARKDOWN.parse(source):
        line = token.map[0] + 1 if token.map else line
        if token.type == "inline":
            yield line, "".join(STANDS_FOR.get(part.type, part.content) for part in token.children or ())


def python_texts(source: str, messages: bool) -> Iterator[Text]:
    """Yield docstrings and comments, and with `messages` every other string that reads like a sentence."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    pieces = {piece for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "`x`" for piece in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            text = node.value
        else:
            continue
        if node in docstrings:
            line = node.lineno
            for part in DOCSTRING_BREAK.split(text):
                if part.strip():
                    yield line, part
                line += part.count("\n")
        elif messages and FIVE_WORDS.match(text):
            yield node.lineno, text
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from joined(
        (*token.start, token.line[: token.start[1]].isspace() or not token.start[1], token.string)
        for token in tokens
        if token.type == tokenize.COMMENT
    )


def comment_texts(source: str) -> Iterator[Text]:
    """Yield comments and alert texts of YAML, TOML, shell, protobuf, Dockerfiles, and the Makefile's helps."""
    comments: list[tuple[int, int, bool, str]] = []
    pattern = re.compile(r"(?<!\S)((?:#+|//) .*)$|^\s*(?:summary|description): (.*)$")
    for number, line in enumerate(source.splitlines(), 1):
        if hit := pattern.search(line):
            comments.append((number, hit.start(), not line[: hit.start()].strip(), hit[1] or hit[2]))
    yield from joined(comments)


def joined(comments: Iterable[tuple[int, int, bool, str]]) -> Iterator[Text]:
    """Join the comments of successive lines in one column that are alone on their lines."""
    texts: list[tuple[int, int, int, str]] = []
    for line, column, is_alone, comment in comments:
        content = "" if PREFORMATTED.match(comment) else comment.lstrip("#/ ")
        if is_alone and texts and texts[-1][1:3] == (line - 1, column) and not DIRECTIVE.match(content):
            start, _, _, text = texts.pop()
            texts.append((start, line, column, f"{text} {content}" if content else text + ".\n"))
        elif content and not DIRECTIVE.match(content):
            texts.append((line, line, column, content))
    return ((start, text) for start, _, _, text in texts)


def texts_of(name: str, source: str) -> Iterator[Text]:
    """Yield the prose of a file, by its kind."""
    if name.endswith(".py"):
        return python_texts(source, messages=name.startswith(MESSAGES))
    if name.endswith(".md.j2"):
        return ((line, text.replace("\n", " ")) for line, text in markdown_texts(TEMPLATE.sub("", source)))
    return markdown_texts(source) if name.endswith(".md") else comment_texts(source)


def alerts(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield rule, advice and sentence of everything in a text that breaks a rule."""
    masked = NAMES.sub("`x`", CODE.sub("`x`", text))
    if len(WORD.findall(masked)) > RULES["max_paragraph_words"]:
        yield "paragraph", f"more than {RULES['max_paragraph_words']} words", masked[:80]
    for sentence in (" ".join(part.split()) for part in SENTENCE_END.split(masked)):
        words = len(WORD.findall(sentence))
        if words > RULES["max_words"]:
            yield "long", f"{words} words, at most {RULES['max_words']}", sentence
        if sentence.count("; ") > RULES["max_semicolons"] and words > 15:
            yield "semicolons", "one idea a sentence: use full stops", sentence
        for rule in RULES["rule"]:
            hit = re.search(rule["pattern"], sentence, re.IGNORECASE)
            if hit and not re.search(rule.get("unless", "(?!)"), sentence, re.IGNORECASE):
                yield rule["name"], f"'{hit[0].strip()}': {rule['say']}", sentence


def file_alerts(name: str, source: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, rule, advice and sentence of every alert of a file."""
    for line, text in texts_of(name, source):
        if name.endswith(".md") and "\n" in text:
            yield line, "line-break", "one line a paragraph", text.partition("\n")[0]
        for rule, advice, sentence in alerts(text):
            yield line, rule, advice, sentence


def allowed_alerts() -> dict[str, int]:
    """Return the allowed number of alerts by file."""
    lines = ALLOWED.read_text().splitlines() if ALLOWED.exists() else []
    return {name: int(number) for name, number in (line.split("\t") for line in lines)}


def main(arguments: list[str]) -> int:
    """Print the alerts that are not allowed; return 1 if there are any."""
    files = () if "--allow" in arguments else (name for name in arguments if not name.startswith("--"))
    named = [str(Path(name).resolve().relative_to(ROOT)) for name in files]
    listing = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split("\n")
    allowed = {} if named else allowed_alerts()
    failed, counts = False, dict[str, int]()
    for name in named or sorted(name for name in listing if CHECKED.search(name) and (ROOT / name).exists()):
        source = (ROOT / name).read_text()
        broken = list(file_alerts(name, source))
        counts[name] = len(broken)
        if "--counts" in arguments:
            words = sum(len(WORD.findall(CODE.sub("`x`", text))) for _, text in texts_of(name, source))
            print(words, len(broken), name, sep="\t")
        elif len(broken) > allowed.get(name, 0) and "--allow" not in arguments:
            failed = True
            for line, rule, advice, sentence in broken:
                print(f"{name}:{line}: {rule}: {advice}\n    {sentence}")
    fallen = {name: counts.get(name, 0) for name, number in allowed.items() if counts.get(name, 0) < number}
    if "--allow" in arguments:
        lower = {name: fallen.get(name, number) for name, number in allowed.items()}
        ALLOWED.write_text("".join(f"{name}\t{number}\n" for name, number in lower.items() if number))
    elif fallen and "--counts" not in arguments:
        print(f"{ALLOWED.name} allows more alerts than there are, run with --allow: {', '.join(fallen)}")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
