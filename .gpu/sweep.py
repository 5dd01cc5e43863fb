"""Sweep of tiles: which way is best for each kernel. Arguments: norms | rest"""
import itertools, json, os, sys, time, statistics
import multiprocessing as mp
import torch, triton
import triton.language as tl
from disttrain.kernels import norms_triton as nt, glu_triton as gt, optimizer_triton as ot
from disttrain.kernels.choice import num_programs
from disttrain.kernels.optimizer_rules import Piece, Rule

def seconds(run, reps=12):
    run()
    torch.cuda.synchronize()
    times = []
    pairs = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); run(); b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)

def norm_tensors(rows, dim, centered, total, dtype=torch.bfloat16):
    x = torch.randn(rows, dim, device="cuda", dtype=dtype)
    g = torch.randn_like(x)
    w = torch.randn(dim, device="cuda", dtype=dtype)
    y, t, st = nt.forward(x, None, w, w if centered else None, 1e-5, centered)
    return x, g, w, st, (torch.randn_like(x) if total else None)

def run_backward(tensors, cfg, centered):
    x, g, w, st, total = tensors
    rows_, dim = x.shape
    warps, stages, per_sm, rows = cfg
    block = triton.next_power_of_2(dim)
    programs = min(triton.cdiv(rows_, rows), num_programs(x.device) * per_sm)
    np_ = 2 if centered else 1
    grad_x = torch.empty_like(x)
    sums = torch.empty((programs, np_, dim), dtype=torch.float32, device="cuda")
    def run():
        nt._norm_backward[(programs,)](g, g if total is None else total, x, w, st, grad_x, sums, rows_, dim, np_,
            IS_CENTERED=centered, HAS_TOTAL=total is not None, HAS_WEIGHT=True, HAS_BIAS=centered, ROWS=rows, BLOCK=block,
            STAGES=stages, num_warps=warps)
    def whole():
        run()
        nt._summed(sums)
    return run, whole

def run_forward(x, w, cfg):
    warps, rows = cfg
    rows_, dim = x.shape
    block = triton.next_power_of_2(dim)
    y = torch.empty_like(x); st = torch.empty(rows_, 1, device="cuda")
    def run():
        nt._norm_forward[(triton.cdiv(rows_, rows),)](x, x, w, w, y, x, st, rows_, dim, 1e-5, IS_CENTERED=False, HAS_RESIDUAL=False,
            HAS_WEIGHT=True, HAS_BIAS=False, ROWS=rows, BLOCK=block, num_warps=warps)
    return run

BACK = [*itertools.product((8,), (2, 3, 4), (2, 3), (1,)), *itertools.product((8,), (2, 3), (2,), (2,)), *itertools.product((16,), (2, 3, 4), (1, 2), (1, 2)), *itertools.product((4,), (2, 3), (2, 3), (1,))]
SHAPES = [(16384, 4096, False, False), (8192, 8192, False, False), (16384, 4096, True, False), (16384, 4096, False, True), (8192, 8192, True, False), (65536, 1024, False, False)]

def norm_jobs():
    for shape in SHAPES:
        for cfg in BACK:
            if cfg[3] == 2 and shape[1] > 4096:
                continue
            yield "back", shape, cfg
    for dim in (4096, 8192, 1024):
        for cfg in itertools.product((2, 4, 8, 16), (1, 2, 4)):
            if cfg[1] * dim <= 16384:
                yield "fwd", ((1 << 26) // dim, dim), cfg

def rest_jobs():
    for back in (False, True):
        for act in ("gelu", "silu"):
            for cfg in itertools.product((512, 1024, 2048, 4096), (2, 4, 8)):
                if 4 <= cfg[0] // (cfg[1] * 32) <= 32:
                    yield "glu", (act, back), cfg
    for kind in ("f32", "bf16", "f32 state bf16"):
        for cfg in itertools.product((512, 1024, 2048, 4096), (2, 4, 8)):
            if 4 <= cfg[0] // (cfg[1] * 32) <= 32:
                yield "adamw", kind, cfg

CACHE = {}
def cached(key, make):
    if key not in CACHE:
        CACHE.clear(); torch.cuda.empty_cache()
        CACHE[key] = make()
    return CACHE[key]

def go(job, small):
    what, shape, cfg = job
    if what == "back":
        rows, dim, centered, total = shape
        tensors = cached(shape, lambda: norm_tensors(512 if small else rows, dim, centered, total))
        return run_backward(tensors, cfg, centered)
    if what == "fwd":
        rows, dim = shape
        x, w = cached(shape, lambda: (torch.randn(512 if small else rows, dim, device="cuda", dtype=torch.bfloat16), torch.randn(dim, device="cuda", dtype=torch.bfloat16)))
        return run_forward(x, w, cfg), None
    if what == "glu":
        act, back = shape
        g, u, d = cached("glu", lambda: [torch.randn(1, (1 << 16 if small else 16384 * 14336), device="cuda", dtype=torch.bfloat16) for _ in range(3)])
        gt._BLOCK, warps = cfg
        n = g.numel(); blocks = triton.cdiv(n, cfg[0])
        a, b = cached("glu", None)[:2], None
        out, out2 = cached("glu", None)[2], None
        def run():
            if back:
                gt._glu_backward[(blocks,)](d, g, u, g, u, n, n, n, n, blocks, ACTIVATION=act, BLOCK=cfg[0], num_warps=warps)
            else:
                gt._glu_forward[(blocks,)](g, u, d, n, n, n, blocks, ACTIVATION=act, BLOCK=cfg[0], num_warps=warps)
        return run, None
    def make():
        n = 1 << 16 if small else 4194304
        pdt = torch.bfloat16 if shape == "bf16" else torch.float32
        sdt = torch.float32 if shape == "f32" else torch.bfloat16
        return [Piece(torch.ones(n, device="cuda", dtype=pdt), torch.full((n,), 1e-3, device="cuda", dtype=pdt), (torch.zeros(n, device="cuda", dtype=sdt), torch.zeros(n, device="cuda", dtype=sdt)), None, i) for i in range(2 if small else 64)]
    pieces = cached(shape, make)
    rule = Rule("adamw", 1e-3, 0.1, 0.9, 0.95, 1e-8, 0.1, 0.1, step=1)
    def run():
        ot._BLOCK, ot._NUM_WARPS = cfg
        ot._blocks.cache_clear() if ot._last != cfg[0] else None
        ot._last = cfg[0]
        ot.update(pieces, rule, None)
    return run, None
ot._last = 0

@triton.jit
def _pack(table, tensors, blocks, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    tensor = tl.load(tensors + tl.program_id(0))
    places = tl.load(blocks + tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    row = table + tensor * 3
    size = tl.multiple_of(tl.load(row + 2), 16)
    source = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(tl.load(row).to(tl.pointer_type(TARGET)), 16)
    tl.store(target + places, tl.load(source + places, mask=places < size).to(TARGET), mask=places < size)

def packs():
    shapes = [(4096,), (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (4096,), (14336, 4096), (14336, 4096), (4096, 14336)]
    sources = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    targets = [torch.empty(s, device="cuda") for s in shapes]
    nbytes = sum(t.nbytes for t in sources + targets)
    ms = seconds(lambda: torch._foreach_copy_(targets, sources), 20)
    print(f"foreach_copy_ bf16 to fp32, {nbytes >> 20} MiB: {1e3 * ms:.1f} us, {nbytes / ms / 1e6:.0f} GB/s")
    flat = torch.empty(4, sum(t.numel() for t in sources) // 4, device="cuda")
    ms = seconds(lambda: torch._chunk_cat(sources, dim=0, num_chunks=4, out=flat), 20)
    print(f"chunk_cat bf16 to fp32: {1e3 * ms:.1f} us, {nbytes / ms / 1e6:.0f} GB/s")
    big, bigger = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16), torch.empty(1 << 28, device="cuda")
    ms = seconds(lambda: bigger.copy_(big), 20)
    print(f"copy_ bf16 to fp32: {(big.nbytes + bigger.nbytes) / ms / 1e6:.0f} GB/s")
    ms = seconds(lambda: big.copy_(bigger), 20)
    print(f"copy_ fp32 to bf16: {(big.nbytes + bigger.nbytes) / ms / 1e6:.0f} GB/s")
    places = [bigger.view(torch.bfloat16)[: t.numel()].clone().view(4, -1) for t in sources]
    gathered = torch.randn(4, sum(t.numel() for t in sources) // 4, device="cuda").bfloat16()
    sizes = [t.shape[1] for t in places]
    ms = seconds(lambda: torch.split_with_sizes_copy(gathered, sizes, dim=1, out=places), 20)
    print(f"split_with_sizes_copy bf16: {1e3 * ms:.1f} us, {2 * gathered.nbytes / ms / 1e6:.0f} GB/s")
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)):
        counts = torch.tensor([triton.cdiv(t.numel(), block) for t in sources])
        tensors = torch.repeat_interleave(torch.arange(len(sources)), counts)
        blocks = (torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]).cuda()
        tensors = tensors.cuda()
        table = torch.tensor([[t.data_ptr(), s.data_ptr(), s.numel()] for t, s in zip(targets, sources)]).cuda()
        ms = seconds(lambda: _pack[(len(blocks),)](table, tensors, blocks, SOURCE=tl.bfloat16, TARGET=tl.float32, BLOCK=block, num_warps=warps), 20)
        print(f"one kernel over a table, {block} {warps}: {1e3 * ms:.1f} us, {nbytes / ms / 1e6:.0f} GB/s", flush=True)

def compile_some(jobs):
    for job in jobs:
        try:
            go(job, True)[0]()
            torch.cuda.synchronize()
        except Exception as e:
            pass

def main():
    begin = time.time()
    jobs = list(norm_jobs() if sys.argv[1] == "norms" else rest_jobs())
    limit = float(sys.argv[2])
    n = int(sys.argv[3])
    with mp.get_context("spawn").Pool(n) as pool:
        r = pool.map_async(compile_some, [jobs[i::n] for i in range(n)])
        try:
            r.get(timeout=limit * 0.6)
        except mp.TimeoutError:
            print("compiling took too long")
        pool.terminate()
    print("compiled", time.time() - begin, flush=True)
    found = {}
    for job in jobs:
        if time.time() - begin > limit:
            print("no time left", job); break
        try:
            run, whole = go(job, False)
            ms = seconds(run); msw = seconds(whole) if whole else ms
        except Exception as e:
            ms = msw = float("inf")
        found.setdefault((job[0], str(job[1])), []).append((ms, msw, job[2]))
    for key, rows in found.items():
        rows.sort()
        print(*key)
        for ms, msw, cfg in rows[:7]:
            print(f"   {1e3 * ms:8.1f} us  with sum {1e3 * msw:8.1f} us  {cfg}")
    if sys.argv[1] == "norms":
        for p, d in ((264, 4096), (396, 4096), (132, 8192), (396, 8192)):
            t = torch.randn(p, 1, d, device="cuda")
            print("sum over", p, d, f"torch {1e3 * seconds(lambda: t.sum(0), 30):.1f} us, ours {1e3 * seconds(lambda: nt._summed(t), 30):.1f} us")
    if sys.argv[1] == "rest":
        CACHE.clear()
        try:
            packs()
        except Exception as error:
            print("packs", error)
        for dtype in (torch.float32, torch.bfloat16):
            ps = [torch.ones(4194304, device="cuda", dtype=dtype) for _ in range(64)]
            for q in ps: q.grad = torch.ones_like(q)
            o = torch.optim.AdamW(ps, fused=True); o.step()
            print("torch fused", dtype, f"{1e3 * seconds(o.step):.1f} us")
    print("total", time.time() - begin)

if __name__ == "__main__":
    main()
