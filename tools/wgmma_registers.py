#!/usr/bin/env python3
"""Products in flight whose registers are written: a fault of code with wgmma that no emulation and
few runs show.

    tools/wgmma_registers.py build/CMakeFiles/ebb_cuda.dir/cuda/*.o
    tools/wgmma_registers.py --self-test

A wgmma reads its left operands and adds to its sums until it is waited for. The compiler keeps the
sums apart, but may give the registers of left operands to what is worked out between the product
and the wait. The tool reads the machine code (cuobjdump of CUDA 12 or later) in the order it lies
there and names every instruction between a product and the wait for it that writes one of its
registers. Exit status 1 if there are any. As branches are not followed, a hit may be on a path that
never meets the product: read the code around it.
"""

import argparse
import concurrent.futures
import re
import shutil
import subprocess
import sys

LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
# Instructions whose first operand is not a register they write.
READERS = ("ST", "BAR", "SYNCS", "RED", "UT", "R2UR", "WARP", "MEMBAR", "FENCE", "CCTL", "BRA",
           "EXIT", "RET", "CALL", "NOP", "DEPBAR", "LDGDEPBAR", "LDGSTS")


class Product:
    """One HGMMA: its place and the registers it reads as left operand and adds to."""

    def __init__(self, place, opcode, operands):
        self.place = place
        sums, left = (x.strip() for x in operands.split(",")[:2])
        self.ends_group = "gsb0" in operands
        self.sums = registers(sums, int(re.search(r"64x(\d+)x", opcode).group(1)) // 2)
        self.left = registers(left, 4)


def registers(operand, count):
    first = re.match(r"R(\d+)\b", operand)
    return range(int(first.group(1)), int(first.group(1)) + count) if first else range(0)


def written(opcode, operands):
    count = 1
    if ".128" in opcode or opcode.startswith("LDSM") and opcode.endswith(".4"):
        count = 4
    elif ".64" in opcode or ".WIDE" in opcode or opcode.startswith("LDSM") and opcode.endswith(".2"):
        count = 2
    return registers(operands, count)


def after_wait(products, pending):
    """Products that may still run when all but `pending` groups are known to be done."""
    groups, open_group = [], []
    for p in products:
        open_group.append(p)
        if p.ends_group:
            groups.append(open_group)
            open_group = []
    kept = groups[len(groups) - pending:] if pending else []
    return [p for group in kept for p in group] + open_group


def hits(code):
    """(function, place, instruction, product's place) of each write, in the order of the code."""
    found, function, running, products = [], "", [], 0
    for line in code:
        named = re.search(r"Function : (\S+)", line)
        if named:
            function, running = named.group(1), []
            continue
        match = LINE.match(line)
        if not match:
            continue
        place, opcode, operands = match.groups()
        if opcode.startswith("HGMMA"):
            running.append(Product(place, opcode, operands))
            products += 1
        elif "DEPBAR" in opcode and "gsb0" in operands:
            pending = re.search(r"gsb0,\s*0x([0-9a-f]+)", operands)
            running = after_wait(running, int(pending.group(1), 16) if pending else 0)
        elif not opcode.startswith(READERS):
            for register in written(opcode, operands):
                for p in running:
                    if register in p.left or register in p.sums:
                        found.append((function, place, f"{opcode} {operands}", p.place))
                        break
                else:
                    continue
                break
    return found, products


def hits_of(cuobjdump, path):
    run = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(f"{path}: {run.stderr.strip()}")
    found, products = [], 0
    for function in re.split(r"(?=^.*Function : )", run.stdout, flags=re.M):
        if "HGMMA" in function:  # most have none, and are long
            some, count = hits(function.splitlines())
            found += some
            products += count
    return found, products


SAMPLE = """
        Function : sample
        /*0010*/ HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24 ;
        /*0020*/ HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0030*/ LDSM.16.MT88.4 R{0}, [R14+0x8800] ;
        /*0040*/ @P0 STS [R90], R89 ;
        /*0050*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/ FMUL R88, R1, R2 ;
""".splitlines()


def self_test():
    for first, expected in ((100, 0), (96, 0), (92, 1), (89, 1), (54, 1), (56, 0), (20, 0), (21, 1)):
        found, products = hits(line.replace("{0}", str(first)) for line in SAMPLE)
        if (len(found), products) != (expected, 2):
            raise SystemExit(f"self-test: R{first}: {found}, {products} products")
    waits = [line.replace("{0}", "92").replace("0x0", "0x1") for line in SAMPLE]
    if len(hits(waits)[0]) != 2:  # the wait leaves the last group running
        raise SystemExit("self-test: a wait for all but one group")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("objects", nargs="*", help="objects or libraries of CUDA code")
    parser.add_argument("--cuobjdump", default=shutil.which("cuobjdump"))
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    if not args.objects:
        parser.error("no objects")
    if not args.cuobjdump:
        raise SystemExit("no cuobjdump on the PATH: name it with --cuobjdump")
    bad = products = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for path, (found, count) in zip(
                args.objects, pool.map(lambda p: hits_of(args.cuobjdump, p), args.objects)):
            products += count
            bad += len(found)
            for function, place, instruction, product in found:
                print(f"{path}: {function}: {place} {instruction} writes what {product} uses")
    print(f"{products} products, {bad} writes to registers in use")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
