"""Archives are unpacked, and those that strangers have made to do harm are refused before anything is written outside of their folder."""

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.catalog.adapters.archives import archive, manifest

from weir.catalog.adapters import torchserve
from weir.catalog.adapters.torchserve import read_manifest, unpack
from weir.errors import SettingsError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "unpacked"
    made.mkdir()
    return made


def tarred(path: Path, *members: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as made:
        for member in members:
            made.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return path


def test_a_zip_file_and_a_tar_file_are_unpacked_alike(tmp_path: Path, folder: Path) -> None:
    unpack(archive(tmp_path / "a.mar", {"handler.py": "x = 1", "deep/er.txt": b"\0"}), folder, "a")
    assert read_manifest(folder, "a")["model"]["handler"] == "handler.py"
    assert (folder / "deep" / "er.txt").read_bytes() == b"\0"

    other = tmp_path / "other"
    other.mkdir()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as made:
        made.add(folder, ".")
    unpack(tmp_path / "a.tar.gz", other, "a")
    assert sorted(path.relative_to(other) for path in other.rglob("*")) == sorted(
        path.relative_to(folder) for path in folder.rglob("*")
    )


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "a\\..\\evil", "x" * 2000, "."])
def test_a_name_outside_of_the_archive_is_refused(tmp_path: Path, folder: Path, name: str) -> None:
    for made in (archive(tmp_path / "a.mar", {name: "x"}), tarred(tmp_path / "a.tgz", tarfile.TarInfo(name))):
        with pytest.raises(SettingsError, match=r"^here: has a file .*: must be a path inside of it"):
            unpack(made, folder, "here")
    assert not list(tmp_path.rglob("evil"))


def zip_link(path: Path) -> Path:
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(info, "/etc/passwd")
    return path


def tar_link(kind: bytes) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, "/etc/passwd"
        return tarred(path, info)

    return make


@pytest.mark.parametrize(
    "make", [zip_link, tar_link(tarfile.SYMTYPE), tar_link(tarfile.LNKTYPE), tar_link(tarfile.CHRTYPE)]
)
def test_links_and_devices_are_refused(tmp_path: Path, folder: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(SettingsError, match=r"'link' is a link or a device"):
        unpack(make(tmp_path / "a.mar"), folder, "here")
    assert not list(folder.iterdir())


def test_more_content_than_its_limit_is_refused_unread(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchserve, "_ALWAYS_FITS", 1000)
    with zipfile.ZipFile(tmp_path / "a.mar", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("small", "x")
        made.writestr("bomb", bytes(1 << 20))
    big = tarfile.TarInfo("bomb")
    big.size = 1 << 20
    for bomb in (tmp_path / "a.mar", tarred(tmp_path / "a.tgz", big, content=bytes(1 << 20))):
        with pytest.raises(
            SettingsError, match=r"or more than [0-9]+ bytes of them; if you trust it, unpack it and serve the folder"
        ):
            unpack(bomb, folder, "here")
        assert not (folder / "bomb").exists()


@pytest.mark.parametrize(
    ("kind", "content", "why"),
    [
        (tarfile.GNUTYPE_LONGNAME, b"x" * 5000, "has a header of 5000 bytes, must be at most 4096"),
        (
            tarfile.XHDTYPE,
            b"1" * 5000,
            "has a header of 5000 bytes, must be at most 4096",
        ),  # tarfile's time is quadratic
        (tarfile.XHDTYPE, b"0 a=b\n", "has a record of 0 bytes in a header"),
        (tarfile.XHDTYPE, b"13 size=-512\n", "'file' has -512 bytes"),
        (tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n", "'file' is a link or a device"),
        (tarfile.XGLTYPE, b"9 a=1234\n", "'more' is a link or a device"),  # tarfile copies it for each file
    ],
)
def test_headers_that_would_cost_more_than_their_size(
    tmp_path: Path, folder: Path, kind: bytes, content: bytes, why: str
) -> None:
    more, file = tarfile.TarInfo("more"), tarfile.TarInfo("file")
    more.type, more.size = kind, len(content)
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as made:
        made.addfile(more, io.BytesIO(content))
        made.addfile(file)
    with pytest.raises(SettingsError) as raised:
        unpack(tmp_path / "a.tgz", folder, "here")
    assert why in raised.value.message


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_values_of_a_tar_file(tmp_path: Path, folder: Path, form: int) -> None:
    info = tarfile.TarInfo(name := f"é/{'x' * 200}")
    info.size, info.mtime = 600, 1.5
    with tarfile.open(tmp_path / "a.tgz", "w:gz", format=form) as made:
        made.addfile(info, io.BytesIO(bytes(600)))
        made.addfile(tarfile.TarInfo("last"))
    unpack(tmp_path / "a.tgz", folder, "here")
    assert ((folder / name).read_bytes(), (folder / "last").read_bytes()) == (bytes(600), b"")


def test_a_tar_file_that_ends_within_a_file(tmp_path: Path, folder: Path) -> None:
    info = tarfile.TarInfo("cut")
    info.size = 5000
    (tmp_path / "a.tgz").write_bytes(gzip.compress(info.tobuf() + bytes(512)))
    with pytest.raises(SettingsError, match="it ends within a file"):
        unpack(tmp_path / "a.tgz", folder, "here")


@pytest.mark.parametrize("how", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_whose_pieces_have_no_bound_is_refused(tmp_path: Path, folder: Path, how: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.mar", "w", how) as made:
        made.writestr("small", bytes(1000))
    with pytest.raises(SettingsError, match="must be stored or deflated"):
        unpack(tmp_path / "a.mar", folder, "here")


def test_too_many_files_are_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchserve, "MAX_FILES", 3)
    folders = [tarfile.TarInfo(f"{number}") for number in range(4)]
    for each in folders:
        each.type = tarfile.DIRTYPE
    for many in (
        archive(tmp_path / "a.mar", {f"{number}": "" for number in range(3)}),
        tarred(tmp_path / "a.tgz", *folders),
    ):
        with pytest.raises(SettingsError, match=r"has more than 3 files"):
            unpack(many, folder, "here")


def test_a_name_that_comes_twice_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be unpacked: .*File exists: .*/x'"):
        unpack(tarred(tmp_path / "a.mar", tarfile.TarInfo("x"), tarfile.TarInfo("x")), folder, "here")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x1f\x8b\x08 no tar", b"none at all" * 100])
def test_what_is_no_archive_is_refused(tmp_path: Path, folder: Path, content: bytes) -> None:
    (tmp_path / "a.mar").write_bytes(content)
    with pytest.raises(SettingsError, match=r"^here: is damaged, or no archive"):
        unpack(tmp_path / "a.mar", folder, "here")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "must have a `model` with a `handler`"),
        ('{"model": {"handler": 3}}', "must have a `model` with a `handler`"),
        (manifest("a", serializedFile="lost.pt"), "serializedFile='lost.pt': must be a file of the archive"),
        (manifest("a", modelFile="../../etc/passwd"), "modelFile='../../etc/passwd': must be a file of the archive"),
        (manifest("a", configFile={}), "configFile={}: must be a file of the archive"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(folder: Path, text: str | None, why: str) -> None:
    (folder / "MAR-INF").mkdir()
    if text is not None:
        (folder / "MAR-INF" / "MANIFEST.json").write_text(text)
    with pytest.raises(SettingsError, match=r"^here: MAR-INF/MANIFEST.json: ") as raised:
        read_manifest(folder, "here")
    assert why in raised.value.message
