#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes linker stubs of an older glibc, so that a library linked here runs on systems that are older than this one.

Usage: stubs.py COMPILER VERSION FOLDER, e.g. stubs.py g++ 2.28 build/glibc. Called by glibc.cmake beside it.

glibc keeps every version of a function that it ever had, and a linker takes the newest one. A stub is a shared library
with the names of the real one and no code, in which each name has the newest version that VERSION knows. What is newer
altogether is not in it: the linker then says which function is missing, and shims.c has a place for it.
"""
import pathlib
import re
import subprocess
import sys

# 2.34 moved these into libc.so.6. A system older than that finds them where they were, so the stub puts them there.
MOVED = {"libdl.so.2": re.compile(r"dl(open|close|sym|vsym|error|addr|addr1|info|mopen)$"),
         "libpthread.so.0": re.compile(r"_*(pthread|sem)_")}


def number(version):
    return tuple(int(part) for part in version.split("."))


def real_file(compiler, name):
    """The library as the linker of this compiler finds it, or None."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    path = pathlib.Path(found.stdout.strip())
    return path if path.is_absolute() and path.exists() else None


def exported(path):
    """All (name, version, size, is it data?) that the library defines under a public version of glibc's."""
    listing = subprocess.run(["readelf", "-W", "--dyn-syms", path], check=True, capture_output=True, text=True)
    for line in listing.stdout.splitlines():
        fields = line.split()
        if len(fields) != 8 or fields[6] in ("UND", "ABS") or fields[3] == "TLS":
            continue
        match = re.fullmatch(r"(\w+)@@?GLIBC_(\d+(?:\.\d+)+)", fields[7])
        if match:
            yield match[1], match[2], int(fields[2], 0), fields[3] == "OBJECT"


def chosen(path, limit):
    """For each name its newest version up to the limit, and whether 2.34 gave it another one without changing it."""
    best, moved = {}, set()
    for name, version, size, is_data in exported(path):
        if version == "2.34":
            moved.add(name)
        if number(version) <= limit and (name not in best or number(version) > number(best[name][0])):
            best[name] = (version, size, is_data)
    return best, moved


def write_stub(compiler, folder, soname, symbols):
    """Assembles a library of this name whose symbols are empty."""
    text = [".text"]
    for name, (_, size, is_data) in sorted(symbols.items()):
        kind = "object" if is_data else "function"
        text += [".data" if is_data else ".text", f".globl {name}", f".type {name}, %{kind}", f"{name}: .skip {size or 1}",
                 f".size {name}, {size or 1}"]
    assembly = folder / f"{soname}.s"
    assembly.write_text("\n".join(text) + "\n")
    nodes = {}
    for name, (version, _, _) in symbols.items():
        nodes.setdefault(version, []).append(name)
    lines, before = [], ""
    for version in sorted(nodes, key=number):
        hidden = "" if before else " local: *;"
        lines.append(f"GLIBC_{version} {{ global: {'; '.join(sorted(nodes[version]))};{hidden} }} {before};")
        before = f"GLIBC_{version}"
    script = folder / f"{soname}.map"
    script.write_text("\n".join(lines) + "\n")
    subprocess.run([compiler, "-shared", "-nostdlib", "-nodefaultlibs", f"-Wl,-soname,{soname}",
                    f"-Wl,--version-script={script}", "-x", "assembler", assembly, "-o", folder / soname], check=True)


def write_stubs(compiler, version, folder):
    folder.mkdir(parents=True, exist_ok=True)
    limit = number(version)
    libc, moved = chosen(real_file(compiler, "libc.so.6"), limit)
    libraries = {"libc.so.6": {}, "libm.so.6": chosen(real_file(compiler, "libm.so.6"), limit)[0],
                 **{soname: {} for soname in MOVED}}
    for name, entry in libc.items():
        homes = [soname for soname, names in MOVED.items() if name in moved and names.match(name)]
        libraries[homes[0] if homes else "libc.so.6"][name] = entry
    loader = next(path for name in ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1") if (path := real_file(compiler, name)))
    libraries[loader.name] = chosen(loader, limit)[0]
    for soname, symbols in libraries.items():
        if symbols:
            write_stub(compiler, folder, soname, symbols)

    # What the linker looks for by -l. libpthread and libdl join the C library, as they do in the real one.
    apart = " ".join(str(folder / soname) for soname in (*MOVED, loader.name) if libraries[soname])
    rest = real_file(compiler, "libc_nonshared.a")
    (folder / "libc.so").write_text(f"GROUP ( {folder / 'libc.so.6'} {rest} AS_NEEDED ( {apart} ) )\n")
    for short, soname in (("libm.so", "libm.so.6"), ("libdl.so", "libdl.so.2"), ("libpthread.so", "libpthread.so.0")):
        if libraries[soname]:
            (folder / short).unlink(missing_ok=True)
            (folder / short).symlink_to(soname)


if __name__ == "__main__":
    if len(sys.argv) != 4 or not re.fullmatch(r"2\.\d+", sys.argv[2]):
        sys.exit(__doc__)
    write_stubs(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]).resolve())
