"""The wheel is pure, the links of its page are absolute, the sdist holds what the tests read."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATED = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis",
    "*.so", "*.so.sha256",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="needs setuptools"
)


def generated(folder, names):
    """What commands leave in a checkout, for shutil.copytree; only `runs` of the root is theirs."""
    return GENERATED(folder, names) | ({"runs"} if Path(folder) == ROOT else set())


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Contents of the wheel by name, and the files of the sdist; built where text is ASCII."""
    tree = tmp_path_factory.mktemp("built") / "checkout"
    shutil.copytree(ROOT, tree, ignore=generated)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "setup.py", "-q", "sdist", "bdist_wheel"]
    environment = {**os.environ, **ascii_only}
    said = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=100
    )
    assert said.returncode == 0, said.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as packed:
        held = {name: packed.read(name) for name in packed.namelist()}
    with tarfile.open(sdist) as packed:
        files = {name.partition("/")[2] for name in packed.getnames()}
    return wheel, held, files


def metadata(held):
    (name,) = [name for name in held if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(held[name])


def test_the_wheel_is_for_every_platform_and_holds_the_sources(archives):
    wheel, held, _ = archives
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [file for file in held if file.endswith((".so", ".sha256"))]
    for folder in ("cpu", "cuda"):
        for source in (ROOT / "csrc" / folder).iterdir():
            assert held[f"curvadion/csrc/{folder}/{source.name}"] == source.read_bytes()
    assert "curvadion/ops/native.py" in held and "curvadion_kernels/launch.py" in held
    assert not [file for file in held if file.startswith(("tests", "benchmarks", "examples"))]


def test_links_of_the_projects_page_are_absolute(archives):
    page = metadata(archives[1])
    assert page["Name"] == "curvadion" and page.get_all("Project-URL")
    text = page.get_payload(decode=True).decode("utf-8")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    assert "![" not in text and "*Left: " not in text  # nor a picture's caption
    assert text.startswith("# Curvadion")


def test_the_sdist_holds_what_the_tests_read(archives):
    _, _, files = archives
    folders = ("benchmarks", "csrc", "curvadion", "docs", "examples", "kernels", "tests")
    here = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".md", ".json", ".cpp", ".cu", ".h")
    }
    single = {
        "Makefile",
        "mkdocs.yml",
        "constraints.txt",
        "requirements-torchtitan.txt",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        ".ci/run",
    }
    assert not (here | single) - files
    assert not [file for file in files if file.endswith((".so", ".pyc"))]


def test_the_wheel_works_in_a_clean_environment_without_a_compiler(archives, tmp_path):
    """No network, no compiler; torch comes from the environment of the tests."""
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False, symlinks=True)
    python = clean / "bin" / "python"
    (packages,) = clean.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    install = [sys.executable, "-m", "pip", "-q", "--python", python, "install"]
    # With the checkout on the path pip would find the package installed.
    without_paths = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [*install, "--no-deps", "--no-index", archives[0]],
        env=without_paths, check=True, timeout=60,
    )  # fmt: skip
    kept = ("HOME", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"PATH": str(clean / "bin"), "CURVADION_CACHE": str(tmp_path / "cache")}
    said = subprocess.run(
        [python, "-m", "curvadion.info"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"({packages / 'curvadion'})" in said.stdout
    assert "cpu     not available: building it failed" in said.stdout
    assert "tensors on cpu take 'torch'" in said.stdout
    assert said.stdout.splitlines()[-1] == "Everything works."
