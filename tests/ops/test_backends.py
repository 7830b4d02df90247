"""Which backend runs, what happens where it cannot, and the operators under PyTorch's tracers."""

from __future__ import annotations

import _ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from compiler import needs_compiler
from curvadion import ops
from curvadion.ops import cpu, native
from curvadion.ops import reference as plain
from curvadion.ops.codes import block_bytes, blocks_of
from curvadion.ops.tensors import Tensors
from tolerance import Rounding, assert_close

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

needs_library = pytest.mark.skipif(
    ops.lacking("cpu") is not None,
    reason=f"no library of compiled operations: {ops.lacking('cpu')}",
)


def lists(k=4):
    generator = torch.Generator().manual_seed(0)
    draw = [[torch.randn(20 + i, 3, generator=generator) for i in range(k)] for _ in range(3)]
    return [*draw, [1.0] * k]


def environment_of(**changes):
    given = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CURVADION_BACKEND": None}
    return {key: value for key, value in (given | changes).items() if value is not None}


def python(code):
    """Run code in a fresh process; its output."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment_of(),
        cwd=ROOT,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


# Importing torch takes seconds, and nothing is built before the first operation.
FORKS = """
import json, os, sys
from curvadion import ops
for line in sys.stdin:
    code, environment, *outputs = json.loads(line)
    child = os.fork()
    if child == 0:
        sys.stdin.close()
        for number, output in enumerate(outputs, start=1):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(environment)
        exec(code, {})
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def imported():
    """A process that has imported the package and used nothing of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment_of(), cwd=ROOT,
    )  # fmt: skip
    yield process
    process.communicate()


@pytest.fixture
def fork(imported, tmp_path):
    """Runs code in a fork of that process, with other variables; its output."""

    def run(code, **environment):
        outputs = [tmp_path / "stdout", tmp_path / "stderr"]
        request = [textwrap.dedent(code), environment_of(**environment), *map(str, outputs)]
        print(json.dumps(request), file=imported.stdin, flush=True)
        status = imported.stdout.readline()
        said = "".join(output.read_text("utf-8") for output in outputs)
        assert status == "0\n", said
        return said

    return run


# ---------------------------------------------------------------- selection


@needs_library
def test_the_cpu_takes_compiled_operations(monkeypatch):
    M, G, X, ones = lists()
    R = torch.randn(2, 9, 4)
    for name in ("norms", "momentum_norms", "accumulate_", "local_step_",
                 "column_sum_of_squares", "column_normalize_", "encode_difference_", "decode_",
                 "decode_add_", "average_codes_"):  # fmt: skip
        monkeypatch.setattr(plain, name, None)
    monkeypatch.delenv("CURVADION_BACKEND", raising=False)
    assert ops.backend_for(CPU) == "cpu"
    ops.norms(X)
    ops.momentum_norms(M, G, ones)
    ops.accumulate_(M, G, ones)
    ops.local_step_(X, G, ones, ones, M, ones)
    ops.column_normalize(R, ops.column_sum_of_squares(R))
    codes, own = torch.zeros(4, block_bytes(2), dtype=torch.uint8), torch.zeros(4, 256)
    ops.encode_difference_(codes, X, M, G, bits=2)
    ops.decode_(X, codes, 2)
    ops.decode_add_(X, M, codes, 2)
    ops.average_codes_(codes, own, codes.clone()[None], 0, 2)


@needs_library
def test_what_it_cannot_take_falls_to_plain_pytorch():
    M, G, _, ones = lists()
    M64, G64 = [m.double() for m in M], [g.double() for g in G]
    with ops.use_backend("cpu"):
        norms = ops.momentum_norms(M64, G64, ones)
    assert norms.dtype == torch.float64
    assert torch.equal(norms, plain.momentum_norms(M64, G64, ones))


def test_backends_are_forced_by_argument_and_by_environment(monkeypatch):
    monkeypatch.setenv("CURVADION_BACKEND", "torch")
    assert ops.backend_for(CPU) == "torch"
    monkeypatch.setenv("CURVADION_BACKEND", "numpy")
    with pytest.raises(ValueError, match=r"'numpy' must be one of .*'torch', 'cpu'"):
        ops.norms([torch.ones(1)])
    with ops.use_backend("torch"):
        assert ops.backend_for(CPU) == "torch"
    monkeypatch.delenv("CURVADION_BACKEND")
    before = ops.backend_for(CPU)
    with ops.use_backend("torch"), ops.use_backend(None):
        assert ops.backend_for(CPU) == before
    ops.use_backend("torch")
    assert ops.backend_for(CPU) == "torch"
    ops.use_backend(None)
    assert ops.backend_for(CPU) == before
    with pytest.raises(ValueError, match="'fast'"):
        ops.use_backend("fast")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_forcing_an_absent_backend_says_what_is_missing():
    for name in ("cuda", "triton"):
        with pytest.raises(RuntimeError, match=f"'{name}' is forced.*(no CUDA device|triton)"):
            ops.use_backend(name)


@needs_library
def test_a_forced_backend_refuses_other_devices():
    with (
        ops.use_backend("cpu"),
        pytest.raises(RuntimeError, match=r"'cpu' is forced.*on meta"),
    ):
        ops.backend_for(torch.device("meta"))


USE = """
    import torch
    from curvadion import ops
    print(ops.momentum_norms([torch.full((4,), 3.0)], [torch.zeros(4)], [0.5]).item())
    print(ops.norms([torch.ones(4)]).item())
"""


def test_without_a_compiler_one_line_says_so(fork, tmp_path):
    said = fork(USE, PATH=str(tmp_path), CXX=None, CURVADION_CACHE=str(tmp_path / "cache"))
    assert said.startswith("3.0\n2.0\n")
    assert said.count("\n") == 3 and "no C++ compiler was found: install g++" in said


def test_without_a_compiler_forcing_is_an_error(fork, tmp_path):
    code = """
        from curvadion import ops
        try:
            ops.use_backend("cpu")
        except RuntimeError as error:
            print(error)
    """
    said = fork(code, PATH=str(tmp_path), CXX=None, CURVADION_CACHE=str(tmp_path / "cache"))
    assert "'cpu' is forced but not available: no C++ compiler was found" in said


def test_a_failing_compiler_is_quoted(fork, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of ink' >&2\nexit 1\n")
    compiler.chmod(0o755)
    said = fork(USE, CXX=str(compiler), CURVADION_CACHE=str(tmp_path / "cache"))
    assert "out of ink" in said and "3.0\n2.0\n" in said and said.count("\n") == 3


@needs_library
def test_a_cache_that_cannot_be_written_is_named(fork, tmp_path):
    (tmp_path / "file").write_text("")
    said = fork(USE, CURVADION_CACHE=str(tmp_path / "file"))
    assert "set CURVADION_CACHE" in said and said.count("\n") == 3


def test_torch_needs_no_triton():
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from curvadion import CurvaDion
        from curvadion import ops
        X = torch.nn.Parameter(torch.ones(3, 2))
        X.grad = torch.ones(3, 2)
        CurvaDion([X]).step()
        print(ops.lacking("triton"))
    """
    assert "install triton" in python(code)


# ---------------------------------------------------------------- building


@pytest.fixture
def quick_build(monkeypatch):
    """Has the compiler optimise nothing, which takes most of a build."""
    flags = [flag for flag in native.CXX_FLAGS if flag != "-O3"]
    monkeypatch.setattr(native, "CXX_FLAGS", ["-O0", *flags])


@needs_compiler
@pytest.mark.usefixtures("quick_build")
@pytest.mark.parametrize("ninja", [True, False])
def test_builds_with_and_without_ninja(ninja, tmp_path, monkeypatch):
    if not ninja:
        monkeypatch.setattr(native, "_ninja", lambda: None)
    target = tmp_path / "a folder: with $ odd 'names'" / native.file_name("cpu")
    native.build("cpu", target)
    assert {*target.parent.iterdir()} == {target, native.checksum_file(target)}
    assert native._digest_in(native._load("cpu", target)) == native.source_digest("cpu")


@needs_compiler
def test_a_library_of_other_sources_is_not_used(tmp_path, monkeypatch, request):
    copy_library(tmp_path)
    monkeypatch.setattr(native, "HERE", tmp_path)
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    native.library.cache_clear()
    try:
        assert native.library("cpu")._name == str(tmp_path / native.file_name("cpu"))
        native.library.cache_clear()
        request.getfixturevalue("quick_build")
        monkeypatch.setattr(native, "source_digest", lambda name: "0" * 16)
        monkeypatch.setenv("CURVADION_CACHE", str(tmp_path / "cache"))
        assert native.library("cpu")._name.startswith(str(tmp_path / "cache"))
    finally:
        native.library.cache_clear()


@needs_library
def test_a_library_that_does_not_load_is_built_anew(package, tmp_path, monkeypatch):
    (tmp_path / native.file_name("cpu")).write_text("of another machine")
    monkeypatch.setattr(native, "HERE", tmp_path)
    monkeypatch.setenv("CURVADION_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    try:
        with pytest.raises(native.Unavailable, match=r"does not match .*\.so\.sha256: delete both"):
            native.library("cpu")
        native.checksum_file(tmp_path / native.file_name("cpu")).write_bytes(
            native._checksum(native.file_name("cpu"), b"of another machine")
        )
        with pytest.raises(native.Unavailable, match="does not load"):
            native.library("cpu")
        native.library.cache_clear()
        (tmp_path / "csrc").symlink_to(ROOT / "csrc")
        monkeypatch.setenv("CXX", str(package / "c++"))
        native.source_digest.cache_clear()
        assert native.library("cpu")._name.startswith(str(tmp_path / "cache"))
    finally:
        native.library.cache_clear()
        native.source_digest.cache_clear()


def test_a_user_without_a_home_is_told_what_to_set(fork):
    code = """
        import pathlib
        def home():
            raise RuntimeError("Could not determine home directory.")
        pathlib.Path.home = home
        from curvadion.ops import native
        native.HERE = pathlib.Path("nowhere")
    """
    code = textwrap.dedent(code) + textwrap.dedent(USE)
    said = fork(code, CURVADION_CACHE=None, XDG_CACHE_HOME=None)
    assert said.startswith("3.0\n2.0\n") and "set CURVADION_CACHE" in said


# ---------------------------------------------------------------- the cache


LOAD = """
import os, sys
os.umask(int(sys.argv[1], 8))
exec(sys.argv[3])
import native
if sys.argv[2] != "ninja":
    native._ninja = lambda: None
try:
    native.library("cpu")
    print("loaded")
except native.Unavailable as reason:
    print("unavailable:", reason)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package of native.py, the sources, and a compiler that copies what was compiled once."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "ops").mkdir()
    shutil.copy(native.__file__, folder / "ops")
    (folder / "csrc").symlink_to(native.source_folder("cpu").parent)
    built = copy_library(folder / "built")
    script(folder / "c++", f"#!/bin/sh\nfor last; do :; done\ncp {built} $last\n")
    return folder


def copy_library(folder):
    """The library that this process runs, and its checksum, in another folder."""
    folder.mkdir(exist_ok=True)
    library = Path(native.library("cpu")._name)
    for file in (library, native.checksum_file(library)):
        shutil.copy(file, folder)
    return folder / library.name


def script(path, text, mode=0o755):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def load(package, cache, umask="022", ninja=True, first="", **environment):
    """What native.library says in a fresh process with this cache; first: code that runs before."""
    given = {"CXX": str(package / "c++"), "CURVADION_CACHE": str(cache), **environment}
    env = {key: value for key, value in {**os.environ, **given}.items() if value is not None}
    result = subprocess.run(
        [sys.executable, "-c", LOAD, umask, "ninja" if ninja else "none", first],
        capture_output=True, text=True, env=env, cwd=package / "ops", timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def cache(package, tmp_path):
    """The folder of the library in a cache that has been used."""
    assert load(package, tmp_path / "cache") == "loaded"
    return tmp_path / "cache" / native.source_digest("cpu")


def spoil(library, how):
    content = library.read_bytes()
    if how == "truncated":
        library.write_bytes(content[:4096])
    elif how == "one bit":
        library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "empty":
        library.write_bytes(b"")
    elif how == "foreign":
        shutil.copyfile(_ctypes.__file__, library)
    elif how == "foreign, with its checksum":
        shutil.copyfile(_ctypes.__file__, library)
        checksum = native._checksum(library.name, library.read_bytes())
        native.checksum_file(library).write_bytes(checksum)
    elif how == "checksum":
        native.checksum_file(library).write_bytes(b"\xff")
    elif how == "no checksum":
        native.checksum_file(library).unlink()


@needs_library
@pytest.mark.parametrize(
    "how", ["truncated", "one bit", "empty", "foreign", "checksum", "no checksum"]
)
def test_a_damaged_library_is_built_anew_and_not_loaded(how, package, cache):
    library = cache / native.file_name("cpu")
    assert native.is_whole(library)
    spoil(library, how)
    assert not native.is_whole(library)
    assert load(package, cache.parent) == "loaded"
    assert native.is_whole(library)


@needs_library
def test_another_library_with_its_checksum_is_refused(package, cache):
    spoil(cache / native.file_name("cpu"), "foreign, with its checksum")
    said = load(package, cache.parent)
    assert said.startswith("unavailable: ") and "was built from other sources: delete it" in said


@needs_library
def test_processes_that_build_at_once_share_one_build(package, tmp_path):
    calls = tmp_path / "calls"
    slow = script(tmp_path / "c++", f"#!/bin/sh\necho >> {calls}\nsleep 0.2\n{package}/c++ $@\n")
    load(package, tmp_path / "alone", CXX=slow)
    alone = len(calls.read_text().splitlines())
    with ThreadPoolExecutor(2) as pool:
        cache = tmp_path / "shared"
        said = list(pool.map(lambda _: load(package, cache, CXX=slow), range(2)))
    assert said == ["loaded"] * 2
    assert len(calls.read_text().splitlines()) == 2 * alone > 0
    (folder,) = cache.iterdir()
    library = folder / native.file_name("cpu")
    assert {*folder.iterdir()} == {library, native.checksum_file(library), folder / "lock"}


@needs_library
def test_a_file_system_without_locks_is_no_obstacle(package, tmp_path):
    no_locks = """
import errno, fcntl
def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
"""
    assert load(package, tmp_path / "cache", first=no_locks) == "loaded"
    assert (tmp_path / "cache" / native.source_digest("cpu") / native.file_name("cpu")).exists()


@needs_library
@pytest.mark.parametrize("umask", ["000", "077", "002"])
def test_the_cache_is_for_its_user_alone_whatever_the_umask(umask, package, tmp_path):
    home = tmp_path / "home"
    chosen = {"CURVADION_CACHE": None, "XDG_CACHE_HOME": None, "HOME": str(home)}
    assert load(package, None, umask, **chosen) == "loaded"
    cache = home / ".cache" / "curvadion"
    folders = [home, home / ".cache", cache, cache / native.source_digest("cpu")]
    assert [f"{stat.S_IMODE(path.stat().st_mode):o}" for path in folders] == ["700"] * 4
    assert not [path for path in folders[-1].iterdir() if path.stat().st_mode & 0o022]
    assert load(package, cache, CXX="/bin/false") == "loaded"


@needs_library
@pytest.mark.parametrize(
    ("where", "mode"), [("cache", 0o777), ("cache", 0o1777), ("digest", 0o770)]
)
def test_a_cache_that_others_can_write_is_refused(where, mode, package, cache):
    folder = cache.parent if where == "cache" else cache
    folder.chmod(mode)
    said = load(package, cache.parent)
    assert said.startswith(
        f"unavailable: others can write to the cache {folder} (mode {mode:o}) and could put any "
        f"code there: delete it, or set CURVADION_CACHE to a folder of mode 700"
    )


@needs_library
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("where", ["cache", "digest"])
def test_a_cache_of_somebody_else_is_refused(where, package, cache):
    folder = cache.parent if where == "cache" else cache
    os.chown(folder, 12345, -1)
    said = load(package, cache.parent)
    assert said.startswith(f"unavailable: the cache {folder} belongs to user 12345")
    assert said.endswith("set CURVADION_CACHE to a folder of user 0")


def mode_666(file):
    file.chmod(0o666)


def of_somebody_else(file):
    os.chown(file, 12345, -1)


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def link(file):
    file.symlink_to(file.rename(file.with_suffix(".elsewhere")))


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@needs_library
@pytest.mark.parametrize(
    ("change", "which", "said"),
    [
        (mode_666, "library", "others can write to {} (mode 666)"),
        pytest.param(of_somebody_else, "library", "{} belongs to user 12345", marks=only_root),
        (pipe, "library", "{} is not a regular file"),
        (pipe, "checksum", "{} is not a regular file"),
        (link, "library", "{} is not a regular file"),
    ],
)
def test_a_file_of_the_cache_that_others_could_have_written_is_refused(
    change, which, said, package, cache
):
    library = cache / native.file_name("cpu")
    file = library if which == "library" else native.checksum_file(library)
    change(file)
    answer = load(package, cache.parent)
    assert answer.startswith(f"unavailable: {said.format(file)}") and answer.endswith("delete it")


@needs_library
def test_a_lock_that_is_a_link_leaves_its_target_alone(package, cache):
    precious = cache.parent / "precious"
    precious.write_text("all I have")
    (cache / "lock").unlink()
    (cache / "lock").symlink_to(precious)
    spoil(cache / native.file_name("cpu"), "no checksum")
    said = load(package, cache.parent)
    assert said == f"unavailable: {cache / 'lock'} is a symbolic link: delete it"
    assert precious.read_text("utf-8") == "all I have"


@needs_library
def test_a_lock_keeps_what_it_holds(package, cache):
    (cache / "lock").write_text("kept")
    spoil(cache / native.file_name("cpu"), "no checksum")
    assert load(package, cache.parent) == "loaded"
    assert (cache / "lock").read_text("utf-8") == "kept"


# ---------------------------------------------------------------- compilers

COMPILERS = {
    "/bin/true": "/bin/true reported success and wrote no library",
    "/bin/false": "failed: ",
    "no-such-compiler": "CXX='no-such-compiler' names no program: correct it or unset it",
    "that writes nothing": "does not load",
    "not executable": "names no program: correct it or unset it",
    "of another machine": "Exec format error",
}


@needs_library
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("ninja", [True, False])
def test_what_does_not_compile_is_named(compiler, ninja, package, tmp_path):
    complaint = COMPILERS[compiler]
    if compiler == "that writes nothing":
        compiler = script(tmp_path / "c++", "#!/bin/sh\nfor last; do :; done\n: > $last\n")
    elif compiler == "not executable":
        compiler = script(tmp_path / "c++", "", 0o644)
    elif compiler == "of another machine":
        compiler = script(tmp_path / "c++", "\x7fELF")
        complaint = "failed: " if ninja else complaint
    for _ in range(2):
        said = load(package, tmp_path / "cache", ninja=ninja, CXX=compiler)
        assert said.startswith("unavailable: ") and complaint in said


def test_a_compiler_that_does_nothing_is_one_warning(fork, tmp_path):
    said = fork(USE, CXX="/bin/true", CURVADION_CACHE=str(tmp_path / "cache"))
    assert said == (
        "3.0\n2.0\ncurvadion runs in plain PyTorch on the cpu (cpu: /bin/true reported success and "
        "wrote no library)\n"
    )


@needs_library
def test_the_compiler_may_have_arguments(package, tmp_path):
    said = load(package, tmp_path / "cache", CXX=f"env -u NOTHING {package / 'c++'}")
    assert said == "loaded"


# ---------------------------------------------------------------- exactness


@needs_library
def test_the_number_of_threads_changes_no_bit():
    M = [torch.randn(300_001), torch.randn(17), torch.randn(90_000)]
    G = [torch.randn_like(m) for m in M]
    R = torch.randn(3, 1000, 300)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            momenta = [m.clone() for m in M]
            sums = cpu.column_sum_of_squares(R)
            Q = [torch.empty(1000, 300) for _ in R]
            cpu.column_normalize_(Q, R, sums)
            norms = cpu.momentum_norms(momenta, G, [0.9] * 3)
            cpu.accumulate_(momenta, G, [0.9] * 3)
            results.append([norms, *momenta, sums, *Q])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_lists_that_do_not_match_are_refused(backend):
    if ops.lacking(backend):
        pytest.skip(ops.lacking(backend))
    with ops.use_backend(backend):
        for form in (ops.momentum_norms, ops.accumulate_):
            with pytest.raises((ValueError, RuntimeError)):
                form([torch.ones(3)], [torch.ones(4)], [1.0])
            with pytest.raises(ValueError):
                form([torch.ones(3)] * 2, [torch.ones(3)], [1.0] * 2)
            with pytest.raises(ValueError):
                form([torch.ones(3)], [torch.ones(3)], [])
        with pytest.raises(ValueError):
            ops.local_step_([torch.ones(3)], [torch.ones(3)], [1.0], [1.0, 1.0])


def test_writing_counts_as_a_change_for_autograd():
    """A weight changed between forward and backward must not pass silently."""
    X = torch.ones(3, requires_grad=True)
    loss = (X * X).sum()
    with torch.no_grad():
        ops.local_step_([X], [torch.ones(3)], [0.1], [1.0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------- operators


def operator_calls():
    M, G, X, ones = lists(2)
    R = torch.randn(2, 9, 4)
    Q = [torch.empty(9, 4) for _ in R]
    P = [torch.randn(20 + i, 2) for i in range(2)]
    V = [torch.randn(3, 2) for _ in range(2)]
    rows = sum(blocks_of(x.numel()) for x in X)
    codes = torch.zeros(rows, block_bytes(2), dtype=torch.uint8)
    own = torch.randn(rows, 256)
    library = torch.ops.curvadion
    return {
        "norms": (library.norms, (X,)),
        "momentum_norms": (library.momentum_norms, (M, G, ones)),
        "accumulate_": (library.accumulate_, (M, G, ones)),
        "local_step_": (library.local_step_, (X, G, ones, ones, M, ones, None)),
        "local_step_ seeded": (library.local_step_, (X, G, ones, ones, [], [], [1, 2])),
        "column_sum_of_squares": (library.column_sum_of_squares, (R,)),
        "column_normalize_": (library.column_normalize_, (Q, R, None, None)),
        "low_rank_update_": (library.low_rank_update_, (X, P, V, ones, ones, M, V, ones, None)),
        "symmetric_product": (library.symmetric_product, (R.mT, R, torch.empty(2, 4, 4))),
        "encode_difference_": (library.encode_difference_, (codes, X, M, G, 2, own, 0)),
        "encode_difference_ alone": (library.encode_difference_, (codes, X, [], [], 2, own, 0)),
        "decode_": (library.decode_, (X, codes, 2)),
        "decode_add_": (library.decode_add_, (X, M, codes, 2)),
        "average_codes_": (library.average_codes_, (codes, own, torch.stack([codes, codes]), 1, 2)),
    }


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", list(operator_calls()))
def test_operators_are_registered_as_pytorch_wants_them(name, backend):
    if ops.lacking(backend):
        pytest.skip(ops.lacking(backend))
    operator, arguments = operator_calls()[name]
    with ops.use_backend(backend):
        torch.library.opcheck(operator, arguments)


def whole_step(M, G, X, P, V, R, ones):
    norms = ops.momentum_norms(M, G, ones)
    ops.accumulate_(M, G, ones)
    after = ops.norms(M)
    ops.local_step_(X, G, ones, ones, M, ones)
    Q = ops.column_normalize(R, ops.column_sum_of_squares(R))
    ops.low_rank_update_(X, P, V, ones, ones, M, V, ones)
    Q += ops.symmetric_product(R.mT, R, R.new_empty(2, 4, 4)).sum()
    codes = torch.zeros(2, block_bytes(2), dtype=torch.uint8)
    ops.encode_difference_(codes, X, M, G, bits=2)
    ops.decode_add_(X, M, codes, 2)
    return norms + after + ops.norms(X), Q


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_they_compile_as_one_graph(backend):
    if backend == "inductor" and os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        pytest.skip("inductor asks the processor for its vectors, whose headers are then left out")

    def arguments():
        M, G, X, ones = lists(2)
        P, V = [torch.ones(20 + i, 2) for i in range(2)], [torch.ones(3, 2) for _ in range(2)]
        return M, G, X, P, V, torch.arange(72.0).view(2, 9, 4), ones

    eager, compiled = arguments(), arguments()
    expected = whole_step(*eager)
    # Headers are compiled once for many graphs; here there is one.
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        actual = torch.compile(whole_step, backend=backend, fullgraph=True)(*compiled)
    rounding = Rounding(torch.float32, terms=20)
    for e, a in zip(expected, actual, strict=True):
        assert_close(a, e, rounding)
    for i in (0, 2):
        for e, a in zip(eager[i], compiled[i], strict=True):
            assert_close(a, e, rounding)


def test_lists_that_remember_are_lists():
    M, G, _, ones = lists()
    plainly = ops.momentum_norms(M, G, ones)
    assert torch.equal(ops.momentum_norms(Tensors(M), Tensors(G), ones), plainly)
