# SPDX-License-Identifier: Apache-2.0
"""The reference pages of the documentation site, made from the headers and docstrings themselves.

    c_reference()       include/tessera/*.h
    cpp_reference()     include/tessera/*.hpp, and what dlpack.h and vulkan.h hold for C++
    python_reference()  python/tessera

Each returns Markdown: a heading for every name, the comment or docstring, the declaration without bodies. Called by
tools/site/hooks.py; tests/site/pages_test.py checks that no public name is missing. Python's standard library only.
"""
import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
INCLUDE = ROOT / "include" / "tessera"


def header(name):
    """A public header's text, behind the line that names its licence."""
    return (INCLUDE / name).read_text().partition("\n")[2]


def uncommented(lines):
    """The text of a comment's lines, its marks removed."""
    text = "\n".join(re.sub(r"^\s*(?:/\*|\*/|\*|//)? ?", "", line) for line in lines)
    return re.sub(r"\s*\*/\s*$", "", text).strip()


def linked(text):
    """References such as `docs/algorithm.md, "Aliasing"` as links from a page of reference/."""
    def link(match):
        page, title = match[1], match[2]
        target = f"../{page}.md"
        if title:
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            headings = re.findall(r"^#+ (.*)", (ROOT / "docs" / f"{page}.md").read_text(), re.M)
            known = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            target += f"#{slug}" if slug in known else ""
        return f"[{title or page}]({target})"
    return re.sub(r'docs/\s*(\w+)\.md(?:,\s+"([^"]+)")?', link, text)


def markup(text):
    return re.sub(r"([\[\]*_|])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def escaped(text):
    """Prose of a comment as Markdown: brackets of shapes, and stars, are not markup."""
    parts = re.split(r"(`[^`]*`|\[[^\]]*\]\([^)]*\))", linked(text))
    return "".join(part if index % 2 else markup(part) for index, part in enumerate(parts))


def prose(text):
    """Paragraphs; those whose lines are aligned in columns stay as they are. Lists stay lists."""
    made = []
    for paragraph in filter(None, re.split(r"\n\s*\n", text)):
        lines = paragraph.splitlines()
        aligned = any(re.search(r"\S {3,}\S", line) for line in lines) or all(line.startswith("    ") for line in lines)
        if aligned:
            made.append("```text\n" + textwrap.dedent("\n".join(lines)) + "\n```")
        else:
            for line in lines:
                made.append(escaped(line) if made and not line.startswith("- ") else "\n" + escaped(line))
            made.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(made)).strip()


def declarations(text):
    """(comment, declaration) of each declaration at the top level of C or C++ text, with bodies of functions left out.
    Text is read statement by statement: to the semicolon or the closing brace at depth 0. A comment that begins with
    "Each" is that of all declarations up to the next comment or empty line."""
    lines, at, comment, found, shared = text.splitlines(), 0, [], [], ""
    while at < len(lines):
        line = lines[at]
        if re.match(r"\s*(//|/\*)", line):
            comment.append(line)
            shared = ""
            while line.lstrip().startswith("/*") and "*/" not in lines[at]:
                at += 1
                comment.append(lines[at])
            at += 1
        elif not line.strip() or line.startswith("#"):
            if re.match(r"#define \w+ \S", line) and comment:
                found.append((uncommented(comment), re.sub(r"\s*/\*.*", "", line)))
            comment, shared, at = [], "", at + 1
        else:
            first, depth = at, 0
            while True:
                depth += lines[at].count("{") - lines[at].count("}")
                code = re.sub(r"/\*.*?\*/|//.*", "", lines[at]).rstrip()
                at += 1
                if depth == 0 and code.endswith((";", "}")) or at == len(lines):
                    break
            words = uncommented(comment) or shared
            shared = words if words.startswith("Each ") else ""
            found.append((words, "\n".join(lines[first:at])))
            comment = []
    return found


def without_bodies(code):
    """A C++ function or class without what its functions do."""
    code = re.sub(r" :\n\s+", " : ", code)  # what a constructor begins with, on a line of its own
    if not re.match(r"(struct|class|enum)", code):
        head = re.match(r".*?\)(?= \{)", code, re.S)
        return re.sub(r"^inline ", "", head[0] + ";" if head else code)
    kept, depth, skipping = [], 0, False
    private = False
    for line in code.splitlines():
        if re.match(r"\s*private:", line):
            private = True
        if private and not line.startswith("}"):
            continue
        if not skipping and depth == 1 and re.search(r"\)( const)?( noexcept)?( :.*)? \{", line):
            opens = line.count("{") - line.count("}")
            kept.append(re.sub(r"(\)(?: const)?(?: noexcept)?)( :.*)? \{.*", r"\1;", line))
            skipping = opens > 0
            inner = opens
            continue
        if skipping:
            inner += line.count("{") - line.count("}")
            skipping = inner > 0
            continue
        depth += line.count("{") - line.count("}")
        kept.append(line)
    return re.sub(r"\n\n(?=};)", "\n", "\n".join(kept))


def name_of(code):
    """What a declaration declares."""
    for pattern in [r"#define (\w+)", r"typedef (?:struct|enum) (\w+)", r"(?:struct|class|enum class) (\w+)",
                    r"constexpr [\w:]+ (\w+)", r"(\w+)\("]:
        match = re.search(pattern, code)
        if match:
            return match[1]
    raise ValueError(f"reference.py finds no name in: {code}")


def section(name, comment, code, language):
    lines = [f"### `{name}`", ""]
    if comment:
        lines += [prose(comment), ""]
    return "\n".join([*lines, f"```{language}", code, "```", ""])


def grouped(entries, language, groups):
    made = []
    for title, belongs in groups:
        chosen = [entry for entry in entries if belongs(entry[1])]
        if chosen:
            made += [f"## {title}", "", *(section(name_of(code), comment, code, language) for comment, code in chosen)]
    return "\n".join(made)


def c_reference():
    text = header("tessera.h")
    top = re.match(r"/\*.*?\*/", text, re.S)[0]
    entries = []
    for name in ["tessera.h", *sorted(path.name for path in INCLUDE.glob("*.h") if path.name != "tessera.h")]:
        body = header(name).partition('extern "C" {\n#endif\n')[2]
        body = body.partition("#ifdef __cplusplus\n}\n")[0]  # behind it follows what is for C++
        entries += [(comment, code.replace("TESSERA_API ", "")) for comment, code in declarations(body)]
    is_function = lambda code: not code.startswith(("typedef", "#define"))
    groups = [("Functions", is_function), ("Structs", lambda code: code.startswith("typedef struct")),
              ("Enumerations", lambda code: code.startswith("typedef enum")),
              ("Constants", lambda code: code.startswith("#define"))]
    includes = ("`#include <tessera/tessera.h>`, `<tessera/dlpack.h>` for DLPack, `<tessera/dist.h>`, `<tessera/mpi.h>` and "
                "`<tessera/nccl.h>` for several ranks, `<tessera/vulkan.h>` for Vulkan devices")
    return f"# C\n\n{includes}\n\n{prose(uncommented(top.splitlines()))}\n\n{grouped(entries, 'c', groups)}"


def cpp_reference():
    made, intro = [], []
    for name in ["tessera.hpp", "types.hpp", "dist.hpp", "dlpack.h", "vulkan.h"]:
        text = header(name)
        top = re.match(r"(?://.*\n)+|/\*.*?\*/", text, re.S if name.endswith(".h") else 0)[0]
        intro.append(uncommented(top.splitlines()))
        body = text[text.index("namespace tessera {") + len("namespace tessera {"):text.rindex("}  // namespace tessera")]
        body = re.sub(r"(?://[^\n]*\n)+namespace detail \{.*?\}  // namespace detail\n", "", body, flags=re.S)
        made += [(comment, without_bodies(code)) for comment, code in declarations(body)]
    is_type = lambda code: re.match(r"(struct|class|enum)", code)
    is_constant = lambda code: code.startswith("constexpr")
    groups = [("Functions", lambda code: not is_type(code) and not is_constant(code)), ("Types", is_type),
              ("Constants", is_constant)]
    includes = ("`#include <tessera/tessera.hpp>`, `<tessera/dist.hpp>` for several ranks, `<tessera/dlpack.h>` for "
                "DLPack, `<tessera/vulkan.h>` for Vulkan devices; everything in `namespace tessera`")
    return f"# C++\n\n{includes}.\n\n{prose(intro[0])}\n\n{grouped(made, 'cpp', groups)}"


def call(name, node):
    """How a function is called: its parameters, without `self`, and what it returns."""
    parameters = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    text = f"{name}({parameters})"
    if node.returns and node.name != "__init__":
        text += f" -> {ast.unparse(node.returns)}"
    if len(text) <= 100:
        return text
    parts = re.split(r", (?![^\[]*\])", parameters)
    return f"{name}(\n    " + ",\n    ".join(parts) + ",\n" + text[len(name) + 1 + len(parameters):]


def methods(node):
    """What of a class is for users, __init__ apart; of a protocol's the docstring of the class tells."""
    return [member for member in node.body if isinstance(member, ast.FunctionDef) and member.name[0] != "_"
            and not is_declared(member)]


def is_declared(member):
    """Fields, and functions whose body is `...`."""
    return isinstance(member, ast.AnnAssign) or isinstance(member, ast.FunctionDef) and ast.unparse(member.body) == "..."


def signature(node):
    """A function's first lines, a constant, or a class: how it is made, or the fields that it has."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node)
    if isinstance(node, ast.FunctionDef):
        return call(node.name, node)
    made = [member for member in node.body if isinstance(member, ast.FunctionDef) and member.name == "__init__"]
    if made:
        return call(node.name, made[0])
    fields = ["    " + ast.unparse(member).replace(":\n    ...", ": ...") for member in node.body if is_declared(member)]
    head = f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
    return "\n".join([head + ":", *fields]) if fields else head


def words_of(node):
    return node.words if isinstance(node, ast.Assign) else ast.get_docstring(node) or ""


def description(name, node):
    """A heading, the signature, the docstring; of a class its methods too."""
    yield from [f"### `{name}`", "", "```python", signature(node), "```", "", prose(words_of(node)), ""]
    for method in methods(node) if isinstance(node, ast.ClassDef) else []:
        if any(ast.unparse(mark) == "property" for mark in method.decorator_list):
            code = f"{method.name}: {ast.unparse(method.returns)}"
        else:
            code = call(method.name, method)
        yield from [f"#### `{node.name}.{method.name}`", "", "```python", code, "```", "", prose(words_of(method)), ""]


def definitions(path):
    """{name: node} of a module's functions, classes and constants; these with `words`, the comment beside them."""
    nodes, text = {}, path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            nodes[node.targets[0].id] = node
            node.words = text.splitlines()[node.end_lineno - 1].partition("  # ")[2]
    return nodes


def python_names(module, folder):
    """{name: node} of what a module offers: its __all__, followed to where it is defined, or all that has no _."""
    tree, nodes = ast.parse((folder / module).read_text()), definitions(folder / module)
    if "__all__" not in nodes:
        return {name: node for name, node in nodes.items() if name[0] != "_" and not isinstance(node, ast.Assign)}
    for node in tree.body:
        source = folder / f"{getattr(node, 'module', None)}.py"
        if isinstance(node, ast.ImportFrom) and node.level == 1 and source.exists():
            known = definitions(source)
            nodes.update({name.name: known[name.name] for name in node.names if name.name in known})
    return {name: nodes[name] for name in ast.literal_eval(nodes["__all__"].value)}


def python_reference():
    folder, made = ROOT / "python" / "tessera", ["# Python", ""]
    for module, title in [("__init__.py", "tessera"), ("torch.py", "tessera.torch"), ("jax.py", "tessera.jax"),
                          ("dist.py", "tessera.dist"),
                          ("flash_attn/__init__.py", "tessera.flash_attn"),
                          ("flash_attn/bert_padding.py", "tessera.flash_attn.bert_padding"),
                          ("flash_attn/layers/rotary.py", "tessera.flash_attn.layers.rotary"),
                          ("flash_attn_interface.py", "tessera.flash_attn_interface"),
                          ("flash_attn/cute/interface.py", "tessera.flash_attn.cute.interface"),
                          ("transformers.py", "tessera.transformers")]:
        text = ast.get_docstring(ast.parse((folder / module).read_text())) or ""
        made += [f"## {title}", "", prose(text), ""]
        for name, node in python_names(module, folder).items():
            made += description(f"{title}.{name}", node)
    return "\n".join(made)
