"""Builds an OCI image of Weir, without a daemon, without root and without another image to start from: `make image`.

The lowest layer is Python and what it needs, unpacked from Debian's packages; the next is Weir, its dependencies and pip, from wheels; models,
if a folder is named, are the last. All modules are compiled, since a container writes nothing. Files belong to root and what a server writes to
the group 0, so that any user may run it, as on OpenShift. Layers do not depend on when, where and by whom they are made: the same packages make
the same digest.

Each image gets a bill of materials (CycloneDX) with the packages of both kinds.

    python -m deploy.image core --models deploy/models
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, uuid5

ROOT = Path(__file__).resolve().parents[1]
SUITE, PYTHON = "trixie", "python3.13"
PACKAGES = (PYTHON, "base-files", "busybox", "ca-certificates", "libstdc++6")
# What these depend on for their installation alone.
UNUSED = {"debconf", "gcc-14-base", "mawk", "openssl", "openssl-provider-legacy", "readline-common"}
DROPPED = (
    "share/bug",
    "share/info",
    "share/lintian",
    "share/locale",
    "share/man",
    "share/perl5",
    f"lib/{PYTHON}/idlelib",
)
HOME = "opt/weir"
SITE = f"{HOME}/lib/{PYTHON}/site-packages"
USER, PORT = 1000, 8000
OCI = "application/vnd.oci.image"


class Machine(NamedTuple):
    """A kind of processor as Debian, the linker, wheels and OCI call it."""

    debian: str
    loader: str
    triplet: str
    wheels: str


MACHINES = {
    "x86_64": Machine("amd64", "lib64/ld-linux-x86-64.so.2", "x86_64-linux-gnu", "x86_64-manylinux_2_40"),
    "aarch64": Machine("arm64", "lib/ld-linux-aarch64.so.1", "aarch64-linux-gnu", "aarch64-manylinux_2_40"),
}


class Variant(NamedTuple):
    """What an image is for: the extras of Weir that it has, what it runs, and its ports and variables beside those of all."""

    extras: str
    entrypoint: list[str]
    ports: tuple[int, ...] = ()
    variables: Mapping[str, str] = {}


VARIANTS = {
    "core": Variant("[grpc,otel]", ["weir", "serve"]),
    "embed": Variant("[embed,grpc,otel]", ["weir", "embed", "serve"], (5555, 5556), {"WEIR_ZMQ_PORT": "5555"}),
    # By two variables the runtime of NVIDIA puts the driver into the container. `weir embed serve` reads the third: onnxruntime is that for CPUs.
    "gpu": Variant(
        "[embed,gpu,grpc,images,otel,torch,transformers]",
        ["weir", "serve"],
        variables={
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
            "WEIR_RUNTIME": "torch",
        },
    ),
}
VARIABLES = {
    "PATH": f"/{HOME}/bin:/usr/bin", "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": "/home/weir/.cache", "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
    "WEIR_HOST": "0.0.0.0", "WEIR_PORT": str(PORT), "WEIR_LOG_FORMAT": "json", "WEIR_LIVENESS": "models",
}  # fmt: skip


Descriptor = dict[str, Any]  # by which a file of an image names another


class Layer(NamedTuple):
    """A layer: its descriptor, and the digest of what it holds unpacked."""

    described: Descriptor
    unpacked: str


class Hashed(io.RawIOBase):
    """A file to which is written what is hashed, too."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file, self._hashed = file, hashlib.sha256()

    def write(self, content: Any) -> int:
        """Write `content` and return its size in bytes."""
        self._hashed.update(content)
        return self._file.write(content)

    @property
    def digest(self) -> str:
        """The digest of all that was written, as OCI writes it."""
        return f"sha256:{self._hashed.hexdigest()}"


def run(*command: object, **environment: str) -> str:
    """Run a command and return what it prints. Raises CalledProcessError if it fails."""
    words = [str(each) for each in command]
    return subprocess.run(
        words, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ).stdout


def apt_in(work: Path, machine: Machine) -> list[str]:
    """Return the words that call apt-get for the packages of SUITE, whose lists it has fetched into `work`. It installs nothing here."""
    for each in ("state/lists/partial", "cache/archives/partial"):
        (work / each).mkdir(parents=True)
    (work / "status").touch()
    keys = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org"
    sources = [f"debian {SUITE}", f"debian {SUITE}-updates", f"debian-security {SUITE}-security"]
    (work / "sources.list").write_text("".join(f"deb {keys}/{each} main\n" for each in sources))
    options = {
        "APT::Architecture": machine.debian, "APT::Sandbox::User": "", "Dir::State": work / "state", "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache", "Dir::Etc::sourcelist": work / "sources.list", "Dir::Etc::sourceparts": "/dev/null", "Acquire::Languages": "none",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    run(*apt, "update")
    return apt


def unpack_debian(folder: Path, work: Path, machine: Machine) -> None:
    """Unpack Debian's packages into `folder`. What scanners read about them is in var/lib/dpkg/status.d, as in other images without dpkg."""
    run(*apt_in(work, machine), "install", "--yes", "--download-only", "--no-install-recommends", *PACKAGES)
    status = folder / "var/lib/dpkg/status.d"
    status.mkdir(parents=True)
    for package in sorted((work / "cache/archives").glob("*.deb")):
        name = run("dpkg-deb", "--field", package, "Package").strip()
        if name not in UNUSED:
            run("dpkg-deb", "--extract", package, folder)
            (status / name).write_text(run("dpkg-deb", "--field", package))
    _finish_debian(folder, machine)


def _finish_debian(folder: Path, machine: Machine) -> None:
    """Do what the scripts of the packages would, and drop what a server does not read. Of the documentation, the licences stay."""
    for each in DROPPED:
        shutil.rmtree(folder / "usr" / each, ignore_errors=True)
    for path in (folder / "usr/share/doc").rglob("*"):
        if not path.is_dir() and path.name != "copyright":
            path.unlink()
    certificates = folder / "etc/ssl/certs/ca-certificates.crt"
    certificates.parent.mkdir(parents=True, exist_ok=True)
    known = sorted((folder / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    certificates.write_text("".join(path.read_text() for path in known))
    users = [("root", 0, "/root"), ("weir", USER, "/home/weir")]
    (folder / "etc/passwd").write_text("".join(f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n" for name, uid, home in users))
    (folder / "etc/group").write_text("".join(f"{name}:x:{uid}:\n" for name, uid, _ in users))
    programs = folder / "usr/bin"
    for name in inside(folder, machine, programs / "busybox", "--list").split():
        if not (programs / name).exists():
            (programs / name).symlink_to("busybox")
    compile_modules(folder, machine, folder, f"usr/lib/{PYTHON}")


def inside(debian: Path, machine: Machine, program: Path, *words: object) -> str:
    """Run a program of the unpacked packages by their own linker, for which nobody has to be root, and return what it prints."""
    libraries = debian / "usr/lib" / machine.triplet
    loader = debian / "usr" / machine.loader
    python = {"PYTHONHOME": str(debian / "usr"), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return run(loader, "--library-path", libraries, program, *words, **python)


def compile_modules(debian: Path, machine: Machine, folder: Path, path: str) -> None:
    """Compile the modules under `path` of `folder`. What is compiled names no time, and is not compared with its source."""
    words = ["-q", "--invalidation-mode=unchecked-hash", "-x", "/pip/|/tests?/", "-s", folder, "-p", "/", folder / path]
    inside(debian, machine, debian / "usr/bin" / PYTHON, "-m", "compileall", *words)


def install(folder: Path, wheel: Path, extras: str, more: Sequence[str], machine: Machine) -> None:
    """Install `wheel` with its `extras`, pip and `more` into `folder`, as an environment of the image's Python. Raises CalledProcessError if there are
    no wheels that fit."""
    site, programs = folder / SITE, folder / HOME / "bin"
    target = ("--target", site, "--python-version", PYTHON.removeprefix("python"), "--python-platform", machine.wheels)
    uv = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--only-binary", ":all:", "--link-mode", "copy")
    # As pip and apt, uv is to trust the certificates of the machine; the second name is that of newer versions.
    trusted = {"UV_NATIVE_TLS": "1", "UV_SYSTEM_CERTS": "1"}
    run(*uv, *target, f"weir-serving{extras} @ {wheel.resolve().as_uri()}", "pip", *more, **trusted)
    for record in site.glob("*.dist-info/RECORD"):  # what names the folder and the time of the build goes
        here = ("direct_url.json", "uv_cache.json")
        record.write_text("".join(line for line in record.open() if not any(name in line for name in here)))
        for name in here:
            record.with_name(name).unlink(missing_ok=True)
    shutil.move(site / "bin", programs)
    for script in programs.iterdir():
        head, body = script.read_bytes().split(b"\n", 1)
        if head.startswith(b"#!") and b"python" in head:
            script.write_bytes(f"#!/{HOME}/bin/python\n".encode() + body)
    for name, there in (("python", f"/usr/bin/{PYTHON}"), ("python3", "python")):
        (programs / name).symlink_to(there)
    (folder / HOME / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for each in ("home/weir/.cache", "srv/models"):
        (folder / each).mkdir(parents=True)


def copy_models(models: Path, folder: Path) -> None:
    """Copy the folder `models` to where an image has it in `folder`, without what is compiled or hidden: whoever pulls the image reads all of it."""
    shutil.copytree(models, folder / "srv/models", ignore=shutil.ignore_patterns("__pycache__", ".*"))


def pack(folder: Path, layout: Path, epoch: int) -> Layer:
    """Add `folder` to `layout` as a layer, whose files are of the second `epoch`."""
    path = layout / "layer"
    with path.open("wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as compressed:
        unpacked = Hashed(compressed)
        with tarfile.open(fileobj=unpacked, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for each in sorted(folder.rglob("*")):
                about = _entry(archive.gettarinfo(each, each.relative_to(folder).as_posix()), each, epoch)
                with each.open("rb") if about.isfile() else io.BytesIO() as content:
                    archive.addfile(about, content)
    return Layer(_put(layout, f"{OCI}.layer.v1.tar+gzip", path), unpacked.digest)


def _entry(about: tarfile.TarInfo, path: Path, epoch: int) -> tarfile.TarInfo:
    """Return `about` as it is for whoever builds the image."""
    about.uid, about.gid, about.uname, about.gname, about.mtime = 0, 0, "", "", epoch
    if about.islnk():  # to a file that has another name, too
        about.type, about.linkname, about.size = tarfile.REGTYPE, "", path.stat().st_size
    about.mode = 0o755 if about.mode & 0o100 or not about.isfile() else 0o644
    if about.name.startswith("home/weir"):
        about.uid, about.mode = USER, about.mode | 0o020
    if about.name == "tmp":
        about.mode = 0o1777
    return about


def _put(layout: Path, kind: str, content: Path | bytes) -> Descriptor:
    """Add a file, which moves there, or what it holds to `layout`, under its digest."""
    path = layout / "content"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.rename(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stored = layout / "blobs" / "sha256" / digest
    stored.parent.mkdir(parents=True, exist_ok=True)
    path.rename(stored)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": stored.stat().st_size}


def config_of(variant: Variant, layers: Iterable[Layer], architecture: str, version: str, epoch: int) -> dict[str, Any]:
    """Return what a container runs, and of which layers its files are."""
    config = {
        "User": f"{USER}:0",
        "Env": [f"{name}={value}" for name, value in {**VARIABLES, **variant.variables}.items()],
        "Entrypoint": variant.entrypoint,
        "Cmd": ["--help"],
        "WorkingDir": "/srv/models",
        "ExposedPorts": {f"{port}/tcp": {} for port in (PORT, *variant.ports)},
        "StopSignal": "SIGTERM",
        "Labels": {
            "org.opencontainers.image.title": "Weir",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.source": "https://github.com/weir-serving/weir",
        },
    }
    return {
        "created": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "architecture": architecture,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [each.unpacked for each in layers]},
    }


def write_image(path: Path, layout: Path, name: str, config: dict[str, Any], layers: Sequence[Layer]) -> str:
    """Write `layout` as an archive, which docker, podman and skopeo load as `weir:NAME`, and return the digest of the image."""
    parts = {
        "config": _put(layout, f"{OCI}.config.v1+json", _json(config)),
        "layers": [each.described for each in layers],
    }
    kind = f"{OCI}.manifest.v1+json"
    manifest = _put(layout, kind, _json({"schemaVersion": 2, "mediaType": kind, **parts}))
    names = {
        "org.opencontainers.image.ref.name": f"weir:{name}",
        "io.containerd.image.name": f"docker.io/library/weir:{name}",
    }
    index = {"schemaVersion": 2, "manifests": [{**manifest, "annotations": names}]}
    (layout / "index.json").write_bytes(_json(index))
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    with tarfile.open(path, "w") as archive:
        for each in sorted(layout.iterdir()):
            archive.add(each, each.name)
    return str(manifest["digest"])


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def bill_of_materials(folders: Sequence[Path], name: str, digest: str, epoch: int) -> str:
    """Return the packages in `folders` as a bill of materials in CycloneDX's JSON."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    bom = Bom(serial_number=uuid5(NAMESPACE_OID, digest))
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    bom.metadata.component = Component(
        name=f"weir:{name}", version=digest, type=ComponentType.CONTAINER, bom_ref=digest
    )
    for folder in folders:
        for status in sorted((folder / "var/lib/dpkg/status.d").glob("*")):
            fields = dict(line.split(": ", 1) for line in status.read_text().splitlines() if ": " in line[1:])
            named = {"arch": fields["Architecture"], "distro": SUITE}
            url = PackageURL("deb", "debian", fields["Package"], fields["Version"], named)
            bom.components.add(Component(name=url.name, version=url.version, purl=url, bom_ref=str(url)))
        for each in _installed(folder):
            url = PackageURL("pypi", None, each.name.lower().replace("_", "-"), each.version)
            bom.components.add(Component(name=url.name, version=url.version, purl=url, bom_ref=str(url)))
    bom.register_dependency(bom.metadata.component, bom.components)
    return str(JsonV1Dot6(bom).output_as_string(indent=1))


def _installed(folder: Path) -> list[Distribution]:
    return sorted(distributions(path=[str(folder / SITE)]), key=lambda each: each.name)


def build(name: str, output: Path, more: Sequence[str], models: Path | None, work: Path) -> None:
    """Build the variant `name` into `output`, by way of the empty folder `work`, and print its size and digest."""
    variant, machine = VARIANTS[name], MACHINES[platform.machine()]
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "-C", ROOT, "log", "-1", "--format=%ct"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", work, ROOT)
    (wheel,) = work.glob("weir*.whl")
    debian, installed = work / "debian", work / "installed"
    unpack_debian(debian, work / "apt", machine)
    install(installed, wheel, variant.extras, more, machine)
    compile_modules(debian, machine, installed, HOME)
    folders = [debian, installed]
    if models is not None:
        copy_models(models, work / "models")
        folders.append(work / "models")
    layout = work / "layout"
    layout.mkdir()
    layers = [pack(folder, layout, epoch) for folder in folders]
    output.mkdir(parents=True, exist_ok=True)
    config = config_of(variant, layers, machine.debian, wheel.name.split("-")[1], epoch)
    digest = write_image(output / f"weir-{name}.tar", layout, name, config, layers)
    (output / f"weir-{name}.cdx.json").write_text(bill_of_materials(folders, name, digest, epoch))
    packed = sum(each.described["size"] for each in layers)
    unpacked = sum(path.lstat().st_size for folder in folders for path in folder.rglob("*"))
    sizes = f"{packed / 1e6:.0f} MB, unpacked {unpacked / 1e6:.0f} MB"
    print(f"{output}/weir-{name}.tar: {sizes}, {digest}", flush=True)


def main() -> None:
    """Build the variants that are named."""
    parser = argparse.ArgumentParser(description="Build OCI images of Weir.")
    parser.add_argument("variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--with", dest="more", nargs="*", default=[], metavar="PACKAGE", help="what models import")
    parser.add_argument("--models", type=Path, help="folder to copy to /srv/models, but hidden files")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="folder of the archives (default: build)")
    arguments = parser.parse_args()
    for name in arguments.variants:
        with tempfile.TemporaryDirectory(prefix="weir-image-") as work:
            try:
                build(name, arguments.output, arguments.more, arguments.models, Path(work))
            except subprocess.CalledProcessError as error:  # it has said why
                sys.exit(f"weir:{name} was not built: exit code {error.returncode} of {shlex.join(error.cmd)}")


if __name__ == "__main__":
    main()
