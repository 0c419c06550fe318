"""Ways to damage a checkpoint: each changes a folder and gives the path that is to be named."""

from __future__ import annotations

import re
import shutil

MANIFEST = "checkpoint.json"

# What is damaged, of a checkpoint's folder -----------------------------------------------------


def listed(root, pattern="*"):
    found = [path for path in (root / "arrays").rglob(pattern) if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_size)


def data(root):
    return listed(root, "d/*")[-1]


def second_data(root):
    return listed(root, "d/*")[-2]


def tree(root):  # the nodes of OCDBT's trees lie in the small files
    return listed(root, "d/*")[0]


def root_tree(root):
    return next((root / "arrays" / "d").iterdir())


def top(name):
    return lambda root: root / "arrays" / name


def own_manifest(root):
    return root / "arrays" / "ocdbt.process_0" / "manifest.ocdbt"


def manifest(root):
    return root / MANIFEST


# How it is damaged, beside an older checkpoint --------------------------------------------------


def flipped(file, at, bit=0):
    def damage(root, _):
        path = file(root)
        content = bytearray(path.read_bytes())
        content[min(int(at * len(content)), len(content) - 1)] ^= 1 << bit
        path.write_bytes(content)
        return path

    return damage


def cut(file, to):
    def damage(root, _):
        path = file(root)
        content = path.read_bytes()
        path.write_bytes(content[: to(len(content))])
        return path

    return damage


def appended(file, more=b"\0"):
    def damage(root, _):
        path = file(root)
        path.write_bytes(path.read_bytes() + more)
        return path

    return damage


def missing(file):
    def damage(root, _):
        path = file(root)
        path.unlink()
        return path

    return damage


def folder_missing(name):
    def damage(root, _):
        shutil.rmtree(root / name)
        return root / name

    return damage


def content(file, new):
    def damage(root, _):
        path = file(root)
        path.write_bytes(new)
        return path

    return damage


def edited(pattern, new):
    """Write something else where a pattern is found in the manifest, of the same length."""

    def damage(root, _):
        path = root / MANIFEST
        text = path.read_text()
        found = re.search(pattern, text)
        start, stop = found.span(1)
        replaced = new(found.group(1))
        assert replaced != found.group(1)
        path.write_text(text[:start] + replaced + text[stop:])
        return path

    return damage


def other_digit(digits):
    return ("1" if digits[0] == "0" else "0") + digits[1:]


def zeroed_page(root, _):
    path = data(root)
    changed = bytearray(path.read_bytes())
    middle = len(changed) // 2 // 4096 * 4096
    changed[middle : middle + 4096] = bytes(4096)
    path.write_bytes(changed)
    return path


def of_size(content, size):
    return (content + bytes(size))[:size]


def swapped(one, other):
    """Swap what is in two files; each keeps its size."""

    def damage(root, _):
        first, second = one(root), other(root)
        a, b = first.read_bytes(), second.read_bytes()
        first.write_bytes(of_size(b, len(a)))
        second.write_bytes(of_size(a, len(b)))
        return first

    return damage


def of_another(file):
    """Take the file from the other checkpoint; it keeps its size."""

    def damage(root, older):
        path = file(root)
        path.write_bytes(of_size(file(older).read_bytes(), path.stat().st_size))
        return path

    return damage


def manifest_of_another(root, older):
    """Take the whole manifest: what it speaks of is elsewhere."""
    shutil.copy(older / MANIFEST, root / MANIFEST)
    return root / data(older).relative_to(older)


def other_arrays(root, older):
    shutil.rmtree(root / "arrays")
    shutil.copytree(older / "arrays", root / "arrays")
    return root / "arrays"


def other_arrays_among_these(root, older):
    """Leave every file there and of its size, and have the older arrays readable."""
    sizes = {path: path.stat().st_size for path in listed(root)}
    shutil.copytree(older / "arrays", root / "arrays", dirs_exist_ok=True)
    assert own_manifest(root) in sizes
    for path, size in sizes.items():
        if path != root / "arrays" / "manifest.ocdbt":
            path.write_bytes(of_size(path.read_bytes(), size))
    return root / "arrays" / "manifest.ocdbt"


def other_names(root, older):
    """Put the older arrays under the newer names, size by size."""
    ours, theirs = listed(root, "d/*"), listed(older, "d/*")
    for one, other in zip(ours, reversed(theirs), strict=False):
        one.write_bytes(of_size(other.read_bytes(), one.stat().st_size))
    return ours[0]


def folder_in_place(file):
    def damage(root, _):
        path = file(root)
        path.unlink()
        path.mkdir()
        return path

    return damage


def file_in_place_of_arrays(root, _):
    shutil.rmtree(root / "arrays")
    (root / "arrays").write_bytes(b"arrays")
    return root / "arrays"


def dangling(file):
    def damage(root, _):
        path = file(root)
        path.unlink()
        path.symlink_to("nowhere")
        return path

    return damage


def linked_to_another(root, older):
    path = data(root)
    size = path.stat().st_size
    target = root / "other"
    target.write_bytes(of_size(data(older).read_bytes(), size))
    path.unlink()
    path.symlink_to(target)
    return path


WAYS = {
    "bit at the beginning of data": flipped(data, 0.0, bit=7),
    "bit in the middle of data": flipped(data, 0.5),
    "bit at the end of data": flipped(data, 1.0, bit=3),
    "bit in the second data file": flipped(second_data, 0.6),
    "bit in a small tree": flipped(tree, 0.5),
    "bit in the root tree": flipped(root_tree, 0.3),
    "bit in manifest.ocdbt": flipped(top("manifest.ocdbt"), 0.7),
    "bit in the process' manifest.ocdbt": flipped(own_manifest, 0.7),
    "bit in _METADATA": flipped(top("_METADATA"), 0.5),
    "bit in _sharding": flipped(top("_sharding"), 0.5),
    "bit in the manifest": flipped(manifest, 0.5),
    "digit of a file's digest": edited(r'"num_bytes": \d+,\s+"digest": "(\w{32})"', other_digit),
    "size of a file": edited(r'"num_bytes": (\d+),\s+"digest"', other_digit),
    "name of a file": edited(r'"arrays/(manifest).ocdbt"', lambda _: "moonifest"[:8]),
    "stage in the manifest": edited(r'"stage": (\d)', lambda _: "1"),
    "step in the manifest": edited(r'"step": (\d)', lambda _: "7"),
    "position in the data": edited(r'"next_index": (\d)', lambda _: "0"),
    "shape in the manifest": edited(r'"stored_shape": \[\s+(\d)', lambda _: "9"),
    "dtype in the manifest": edited(r'"dtype": "(float32)"', lambda _: "int32  "),
    "path of a leaf": edited(r'"(scalar)": \{', lambda _: "scalae"),
    "digest of the manifest": edited(r'"digest": "(\w{32})"', other_digit),
    "digest of the manifest is a number": edited(
        r'"digest": ("\w{32}")', lambda found: str(int("1" * 34)).ljust(len(found))
    ),
    "digest of the manifest is short": edited(r'"digest": "(\w{32})"', lambda _: "a"),
    "digest of the manifest is gone": edited(r'"(digest)": "\w{32}"', lambda _: "digost"),
    "format in the manifest": edited(r'"format": (\d)', lambda _: "9"),
    "white space in the manifest": edited(r"(\n \")", lambda found: found.replace(" ", "\t")),
    "data cut by a byte": cut(data, lambda size: size - 1),
    "data cut to half": cut(data, lambda size: size // 2),
    "data cut to nothing": cut(data, lambda _: 0),
    "tree cut by a byte": cut(tree, lambda size: size - 1),
    "manifest cut by a byte": cut(manifest, lambda size: size - 1),
    "manifest cut to half": cut(manifest, lambda size: size // 2),
    "manifest cut to nothing": cut(manifest, lambda _: 0),
    "byte appended to data": appended(data),
    "byte appended to a tree": appended(tree),
    "byte appended to the manifest": appended(manifest),
    "line appended to the manifest": appended(manifest, b"\n"),
    "manifest written twice": lambda root, _: appended(manifest, manifest(root).read_bytes())(
        root, _
    ),
    "data missing": missing(data),
    "tree missing": missing(tree),
    "root tree missing": missing(root_tree),
    "manifest.ocdbt missing": missing(top("manifest.ocdbt")),
    "process' manifest.ocdbt missing": missing(own_manifest),
    "_METADATA missing": missing(top("_METADATA")),
    "_sharding missing": missing(top("_sharding")),
    "manifest missing": missing(manifest),
    "arrays missing": folder_missing("arrays"),
    "a process' arrays missing": folder_missing("arrays/ocdbt.process_0"),
    "two data files swapped": swapped(data, second_data),
    "data and tree swapped": swapped(data, tree),
    "zeros over a page": zeroed_page,
    "data of another checkpoint": of_another(data),
    "tree of another checkpoint": of_another(root_tree),
    "manifest.ocdbt of another checkpoint": of_another(top("manifest.ocdbt")),
    "manifest of another checkpoint": manifest_of_another,
    "arrays of another checkpoint": other_arrays,
    "arrays of another checkpoint among these": other_arrays_among_these,
    "arrays of another checkpoint under these names": other_names,
    "manifest is a list": content(manifest, b"[]"),
    "manifest is an empty object": content(manifest, b"{}"),
    "manifest is null": content(manifest, b"null"),
    "manifest is a number": content(manifest, b"7"),
    "manifest is a text": content(manifest, b'"format"'),
    "manifest has a format and nothing else": content(manifest, b'{"format": 7}'),
    "manifest has a digest and nothing else": content(
        manifest, b'{"format": 7, "digest": "00000000000000000000000000000000"}'
    ),
    "manifest is not UTF-8": content(manifest, b'{"format": 7, "digest": "\xff\xfe"}'),
    "manifest is nested deeply": content(manifest, b"[" * 200_000),
    "manifest is zeros": content(manifest, bytes(4096)),
    "folder in place of data": folder_in_place(data),
    "folder in place of _METADATA": folder_in_place(top("_METADATA")),
    "folder in place of the manifest": folder_in_place(manifest),
    "file in place of arrays": file_in_place_of_arrays,
    "link to nothing in place of data": dangling(data),
    "link to other data": linked_to_another,
}
#: Ways after which there is no manifest, and so no checkpoint.
NONE = ("manifest missing", "folder in place of the manifest")
