#!/usr/bin/env python3
"""Fails on device code that compiled into something slow, of which the compiler only makes a remark.

  tools/check_device_code.py [--table] BUILD_LOG OBJECT...   BUILD_LOG holds ptxas's text (-Xptxas -v) of these objects
  tools/check_device_code.py --self-test

Looked for: spilled registers; local memory (a stack frame, LDL or STL instructions); serialised wgmma; setmaxnreg that
was ignored. A kernel of an object that the log does not mention fails as well: nothing is known about it, and it has to
be compiled from nothing. --table prints a line a kernel. Exit 1: found something; exit 2: a file or tool is missing.
"""

import argparse
import pathlib
import re
import sys

import sass_digest

# What must not stand in the log, whatever kernel it speaks of.
REMARKS = {
    "wgmma is serialised": re.compile(r"wgmma\.mma_async instructions are serialized", re.I),
    "setmaxnreg is ignored": re.compile(r"setmaxnreg\W.{0,40}ignored|ignor\w+.{0,40}setmaxnreg|\bC7508\b", re.I),
    "registers are spilled": re.compile(r"registers are spilled to local memory", re.I),
    "local memory is used": re.compile(r"local memory used for", re.I),
}
PROPERTIES = re.compile(r"Function properties for (\S+)")
ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def log_kernels(text):
    """The (architecture, symbol) of each kernel whose compilation the log reports."""
    return {(arch, symbol) for symbol, arch in ENTRY.findall(text)}


def log_problems(text):
    problems, function = [], "?"
    for line in text.splitlines():
        if match := PROPERTIES.search(line):
            function = match[1]
        if match := FRAME.search(line):
            frame, stores, loads = map(int, match.groups())
            if stores or loads:
                problems.append(f"{function}: spills {stores} bytes, reads back {loads}")
            if frame:
                problems.append(f"{function}: a stack frame of {frame} bytes")
        problems.extend(f"{what}: {line.strip()}" for what, pattern in REMARKS.items() if pattern.search(line))
    return problems


def object_problems(kernels):
    """Of descriptions as sass_digest makes them."""
    problems = []
    for name, kernel in kernels.items():
        for key in ("stack", "local"):
            if kernel[key]:
                problems.append(f"{name}: {kernel[key]} bytes of {key} memory")
        if kernel["local_accesses"]:
            problems.append(f"{name}: {kernel['local_accesses']} instructions that access local memory (LDL, STL)")
    return problems


def unreported(kernels, text):
    known = {f"{arch} {sass_digest.kernel_name(symbol)}" for arch, symbol in log_kernels(text)}
    return [f"{name}: not in the log, so what ptxas said of it is unknown" for name in kernels if name not in known]


def print_table(kernels):
    print(f"{'regs':>4} {'shared':>7} {'stack':>6} {'ldlstl':>6} {'instr':>7}  kernel")
    for name, kernel in sorted(kernels.items()):
        arch, symbol = name.split(" ", 1)
        print(f"{kernel['registers']:>4} {kernel['shared']:>7} {kernel['stack']:>6} {kernel['local_accesses']:>6} "
              f"{kernel['instructions']:>7}  {arch} {sass_digest.readable(symbol)}")


def check(log, objects, table):
    """The problems of these files, and how many kernels they have."""
    if not log.is_file():
        raise sass_digest.ToolError(f"no such file: {log}")
    text = log.read_text(errors="replace")
    kernels = {}
    for path in objects:
        kernels.update(sass_digest.kernels_of(path))
    if table:
        print_table(kernels)
    return [*log_problems(text), *object_problems(kernels), *unreported(kernels, text)], len(kernels)


GOOD_LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4Goodv' for 'sm_90a'
ptxas info    : Function properties for _Z4Goodv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
"""
BAD_LOGS = {
    "spill stores": GOOD_LOG.replace("0 bytes spill stores", "8 bytes spill stores"),
    "spill loads": GOOD_LOG.replace("0 bytes spill loads", "12 bytes spill loads"),
    "stack frame": GOOD_LOG.replace("0 bytes stack frame", "32 bytes stack frame"),
    "a device function's frame": GOOD_LOG + "ptxas info    : Function properties for _Z6Helperv\n"
                                 "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n",
    "serialised wgmma": GOOD_LOG + "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions "
                        "are serialized due to insufficient register resources for the wgmma pipeline in function "
                        "'_Z4Goodv'\n",
    "serialised wgmma without a number": GOOD_LOG + "Potential Performance Loss: wgmma.mma_async instructions are "
                                         "serialized due to non wgmma instructions defining accumulator registers\n",
    "ignored setmaxnreg": GOOD_LOG + "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to "
                          "maintain minimum register requirement in '_Z4Goodv'\n",
    "ignored setmaxnreg, other words": GOOD_LOG + "ptxas info : setmaxnreg ignored; unable to determine register count "
                                       "at entry\n",
    "warned spill": GOOD_LOG + "ptxas warning : Registers are spilled to local memory in function '_Z4Goodv', 8 bytes "
                    "spill stores, 12 bytes spill loads\n",
    "warned local memory": GOOD_LOG + "ptxas warning : Local memory used for function '_Z4Goodv', size 16 bytes\n",
}
SASS = """
\tcode for sm_90a
\t\tFunction : _Z4Goodv
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000800 */
        /*0010*/              @!P0 {} ;                                   /* 0x0000000001007387 */
        /*0020*/                   BRA 0x20;                              /* 0xfffffffc00fc7947 */
        /*0030*/                   NOP;                                   /* 0x0000000000007918 */
"""
RESOURCES = """
arch = sm_90a
Resource usage:
 Function _Z4Goodv:
  REG:168 STACK:{} SHARED:1024 LOCAL:{} CONSTANT[0]:548 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def parsed(instruction="STG.E [R2], R3", stack=0, local=0):
    functions = sass_digest.parse_sass(SASS.format(instruction))
    resources = sass_digest.parse_resources(RESOURCES.format(stack, local))
    return {f"{key[0]} {key[1]}": sass_digest.describe(code, resources[key]) for key, code in functions.items()}


BAD_OBJECTS = {"STL": {"instruction": "STL.64 [R1+0x8], R2"}, "LDL": {"instruction": "LDL.LU R2, [R1]"},
               "a stack": {"stack": 8}, "local": {"local": 16}}


def self_test():
    """Which known texts are judged wrongly."""
    good = parsed()
    failures = [] if len(good) == 1 else ["the good SASS is not parsed"]
    if problems := [*log_problems(GOOD_LOG), *object_problems(good), *unreported(good, GOOD_LOG)]:
        failures.append(f"good code is refused: {problems}")
    failures += [f"log not refused: {name}" for name, text in BAD_LOGS.items() if not log_problems(text)]
    failures += [f"object not refused: {name}" for name, how in BAD_OBJECTS.items()
                 if not object_problems(parsed(**how))]
    if not unreported(good, "") or not unreported(good, GOOD_LOG.replace("sm_90a", "sm_80")):
        failures.append("a kernel that the log does not mention is not refused")
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="judge known texts, good and bad")
    parser.add_argument("--table", action="store_true", help="print a line a kernel")
    parser.add_argument("log", metavar="BUILD_LOG", nargs="?", type=pathlib.Path)
    parser.add_argument("objects", metavar="OBJECT", nargs="*")
    args = parser.parse_args()
    if args.self_test:
        failures = self_test()
        print("\n".join(failures) or f"{len(BAD_LOGS) + len(BAD_OBJECTS) + 2} bad texts refused, the good ones pass")
        sys.exit(1 if failures else 0)
    if not args.log or not args.objects:
        parser.error("a build log and at least one object are needed")
    try:
        problems, count = check(args.log, args.objects, args.table)
    except sass_digest.ToolError as error:
        print(f"check_device_code: {error}", file=sys.stderr)
        sys.exit(2)
    for problem in problems:
        print(f"check_device_code: {problem}", file=sys.stderr)
    print(f"{count} kernels, {len(problems)} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
