#!/usr/bin/env python3
"""Says which kernels a change has changed: digests of their machine code (SASS), taken before and after.

  tools/sass_digest.py snapshot OUT.json OBJECT...   objects, cubins, libraries or programs with device code
  tools/sass_digest.py compare OLD.json NEW.json     exit 1 and a list if kernels were added, removed or changed
  tools/sass_digest.py --install                     cuobjdump and nvdisasm from PyPI into build/tools-venv

A digest is of the instructions' text: encodings (and with them stall counts) and addresses are left out, branch targets
are numbered in order. cuobjdump is looked for on PATH, in /usr/local/cuda/bin and in the packages nvidia-cuda-cuobjdump
and nvidia-cuda-nvdisasm. Exit 2: a file or tool is missing or unusable.
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS_VENV = ROOT / "build" / "tools-venv"
PACKAGES = ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
FORMAT = 1  # of the snapshot; raised when digests change for the same code

CODE_FOR = re.compile(r"^\s*code for (\S+)")
FATBIN_ARCH = re.compile(r"^arch = (\S+)")
FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
RESOURCE_FUNCTION = re.compile(r"^\s*Function (\S+):\s*$")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s")
# Instructions whose last operand can be an address of the same function.
BRANCH = re.compile(r"^(?:@!?U?P[T0-9]+ )?(?:BRA|BRX|JMP|JMX|BSSY|CALL|RET|WARPSYNC|LEPC|SSY|PBK|PCNT)\b")
ADDRESS = re.compile(r"`\(([^)]+)\)|\b0x[0-9a-f]+$")
# nvcc puts hashes of the source into the names of kernels with internal linkage.
INTERNAL_NAME = re.compile(r"(_GLOBAL__N__|_INTERNAL_)[0-9a-f]{8}(_\d+_\w+?_cu_)([0-9a-f]{8})?")


class ToolError(Exception):
    """Something that the user must put right; the message says what."""


def tool_folders():
    """Where the tools can be, in the order in which they are preferred."""
    yield from os.environ.get("PATH", "").split(os.pathsep)
    yield "/usr/local/cuda/bin"
    for site in [*TOOLS_VENV.glob("lib/python*/site-packages"), *map(pathlib.Path, sys.path)]:
        yield from map(str, sorted(site.glob("nvidia/*/bin")))


def find_tool(name):
    for folder in tool_folders():
        found = shutil.which(name, path=folder) if folder else None
        if found:
            return found
    raise ToolError(f"no {name} on PATH, in /usr/local/cuda/bin or in the packages {' and '.join(PACKAGES)}; "
                    "`tools/sass_digest.py --install` fetches it")


def install():
    venv.create(TOOLS_VENV, with_pip=True)
    done = subprocess.run([TOOLS_VENV / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES])
    if done.returncode != 0:
        raise ToolError(f"pip could not install {' and '.join(PACKAGES)} into {TOOLS_VENV}")


def cuobjdump(*arguments):
    command = [find_tool("cuobjdump"), *map(str, arguments)]
    # It calls nvdisasm by name.
    path = os.pathsep.join([str(pathlib.Path(find_tool("nvdisasm")).parent), os.environ.get("PATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, "PATH": path})
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise ToolError(f"{' '.join(command)}: {message}")
    return done.stdout


def kernel_name(symbol):
    """The symbol without hashes; of the same length, so that it can still be read as a C++ name."""
    return INTERNAL_NAME.sub(lambda match: match[1] + "0" * 8 + match[2] + "0" * len(match[3] or ""), symbol)


def readable(symbol):
    """The name as C++ has it, where the machine has c++filt."""
    filt = shutil.which("c++filt")
    if not filt:
        return symbol
    return subprocess.run([filt, symbol], capture_output=True, text=True).stdout.strip() or symbol


def parse_sass(text):
    """(architecture, symbol) -> [(offset, instruction)], from `cuobjdump -sass`."""
    functions, arch, current = {}, "", None
    for line in text.splitlines():
        if match := CODE_FOR.match(line):
            arch, current = match[1], None
        elif match := FUNCTION.match(line):
            current = functions.setdefault((arch, match[1]), [])
        elif current is not None and (match := INSTRUCTION.match(line + " ")):
            current.append((int(match[1], 16), re.sub(r"\s+", " ", match[2])))
    return functions


def parse_resources(text):
    """(architecture, symbol) -> {"REG": .., "STACK": .., "SHARED": .., "LOCAL": ..}, from `cuobjdump -res-usage`."""
    resources, arch, symbol = {}, "", None
    for line in text.splitlines():
        if match := FATBIN_ARCH.match(line):
            arch, symbol = match[1], None
        elif match := RESOURCE_FUNCTION.match(line):
            symbol = match[1]
        elif symbol and "REG:" in line:
            resources[arch, symbol] = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
            symbol = None
    return resources


def without_padding(code):
    """Up to the branch to itself that ends each function; behind it stand no-operations that fill its last block."""
    end = len(code)
    while end > 0 and code[end - 1][1] == "NOP":
        end -= 1
    return code[:end]


def mnemonic(instruction):
    words = instruction.split()
    return words[1] if words[0].startswith("@") and len(words) > 1 else words[0]


def normalised(code):
    """The text of the instructions with branch targets as labels, numbered in order of their first use."""
    labels, lines = {}, []
    for offset, instruction in code:
        if BRANCH.match(instruction) and (target := ADDRESS.search(instruction)):
            label = labels.setdefault(target[0], f"L{len(labels)}")
            instruction = instruction[:target.start()] + label + instruction[target.end():]
        lines.append((offset, instruction))
    return [f"{labels.get(hex(offset), '')}: {instruction}" for offset, instruction in lines]


def is_local_access(name):
    return name.split(".")[0] in ("LDL", "STL")


def describe(code, resources):
    code = without_padding(code)
    names = collections.Counter(mnemonic(instruction) for _, instruction in code)
    return {
        "sha256": hashlib.sha256("\n".join(normalised(code)).encode()).hexdigest(),
        "registers": resources["REG"],
        "shared": resources["SHARED"],
        "stack": resources["STACK"],
        "local": resources["LOCAL"],
        "local_accesses": sum(count for name, count in names.items() if is_local_access(name)),
        "instructions": len(code),
        "mnemonics": dict(sorted(names.items())),
    }


def kernels_of(path):
    """"architecture symbol" -> description, of one file."""
    if not pathlib.Path(path).is_file():
        raise ToolError(f"no such file: {path}")
    functions = parse_sass(cuobjdump("-sass", path))
    resources = parse_resources(cuobjdump("-res-usage", path))
    if not functions:
        raise ToolError(f"{path}: no kernel in it")
    kernels = {}
    for (arch, symbol), code in functions.items():
        if (arch, symbol) not in resources:
            raise ToolError(f"{path}: cuobjdump -res-usage does not know {symbol} ({arch})")
        if not code:
            raise ToolError(f"{path}: cuobjdump -sass shows no instruction of {symbol} ({arch})")
        kernels[f"{arch} {kernel_name(symbol)}"] = describe(code, resources[arch, symbol])
    return kernels


def snapshot(out, objects):
    kernels, origin = {}, {}
    for path in objects:
        for name, kernel in kernels_of(path).items():
            if name in kernels and kernels[name] != kernel:
                raise ToolError(f"{name} is in {origin[name]} and, different, in {path}")
            kernels[name], origin[name] = kernel, path
    version = cuobjdump("--version").strip().splitlines()[-1]
    pathlib.Path(out).write_text(json.dumps({"format": FORMAT, "cuobjdump": version, "kernels": kernels}, indent=1,
                                            sort_keys=True) + "\n")
    print(f"{len(kernels)} kernels of {len(objects)} files: {out}")


def load(path):
    try:
        document = json.loads(pathlib.Path(path).read_text())
        if document["format"] != FORMAT:
            raise ToolError(f"{path}: of format {document['format']}, this tool reads {FORMAT}: take it again")
        return document
    except OSError as error:
        raise ToolError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ToolError(f"{path}: not a snapshot ({error!r})") from error


def difference(old, new):
    """What has changed of one kernel, in words; empty if nothing."""
    words = [f"{key} {old[key]} -> {new[key]}"
             for key in ("registers", "shared", "stack", "local", "local_accesses", "instructions")
             if old[key] != new[key]]
    if old["sha256"] == new["sha256"]:
        return ", ".join(words)
    same = "same" if old["mnemonics"] == new["mnemonics"] else "other"
    return ", ".join(["code", *words, f"{same} mnemonics"])


def compare(old_path, new_path):
    """Prints the differences and returns how many kernels have any."""
    old, new = load(old_path), load(new_path)
    if old["cuobjdump"] != new["cuobjdump"]:
        print(f"note: taken with different tools: {old['cuobjdump']} | {new['cuobjdump']}", file=sys.stderr)
    count = 0
    for name in sorted(old["kernels"].keys() | new["kernels"].keys()):
        before, after = old["kernels"].get(name), new["kernels"].get(name)
        if before is None or after is None:
            text = "added" if before is None else "removed"
        else:
            text = difference(before, after)
            text = f"changed: {text}" if text else ""
        if text:
            count += 1
            arch, symbol = name.split(" ", 1)
            print(f"{arch} {readable(symbol)}: {text}")
    print(f"{count} of {len(old['kernels'].keys() | new['kernels'].keys())} kernels differ")
    return count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install the tools from PyPI into build/tools-venv")
    commands = parser.add_subparsers(dest="command")
    take = commands.add_parser("snapshot", help="write the digests of all kernels in OBJECT...")
    take.add_argument("out", metavar="OUT.json")
    take.add_argument("objects", metavar="OBJECT", nargs="+")
    check = commands.add_parser("compare", help="list the kernels that differ; exit 1 if any")
    check.add_argument("old", metavar="OLD.json")
    check.add_argument("new", metavar="NEW.json")
    args = parser.parse_args()
    if not args.install and args.command is None:
        parser.error("nothing to do: snapshot, compare or --install")
    try:
        if args.install:
            install()
        if args.command == "snapshot":
            snapshot(args.out, args.objects)
        if args.command == "compare":
            sys.exit(1 if compare(args.old, args.new) else 0)
    except ToolError as error:
        print(f"sass_digest: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
