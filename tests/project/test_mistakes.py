"""What people do wrong in their first minutes: each ends in one sentence that says what to do instead.

``t`` is a tensor, ``m`` a module, ``h`` a handle; ``text`` a file of words, ``dir`` an empty folder, ``ok.pt`` and
``ok.safetensors`` checkpoints of a tensor ``a``, ``store`` samples.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops import data, offload, storage
from nvme_ops.integrations.safetensors import safe_open
from nvme_ops.measure import tune
from tests.conftest import refusal
from tests.project.test_surface import public

#: Calls, and which of their arguments are switches.
SWITCHES = {
    "nvme_ops.aio_handle({})": "single_submit overlap_events",
    **{f"h.{name}(t, 'text', {{}})": "validate" for name in ("read", "write", "pread", "pwrite")},
    "nvme_ops.save({{'a': t}}, 'x.pt', {})": "durable checksums recycle",
    "nvme_ops.save_async({{'a': t}}, 'x.pt', {})": "durable checksums recycle",
    "nvme_ops.load('ok.pt', {})": "strict verify mmap",
    "nvme_ops.dcp.save({{'a': t}}, 'x', {})": "durable checksums overwrite",
    "nvme_ops.dcp.load({{'a': t}}, 'x', {})": "verify",
    "nvme_ops.dcp.NvmeStorageWriter('x', {})": "durable checksums overwrite cache_staged_state_dict",
    "nvme_ops.dcp.NvmeStorageReader('x', {})": "verify",
    "nvme_ops.dcp.use_by_default({})": "enabled",
    "storage.Session('dir', name='x', {})": "reuse",
    "storage.TensorStore(storage.Session('dir', name='x'), {})": "checksums journal",
    "storage.TensorStore(storage.Session('dir', name='x')).put('a', t, {})": "atomic",
    "data.SampleWriter('w', {})": "checksums overwrite",
    "data.SampleStore('store', {})": "verify",
    "data.Loader('store', {})": "drop_last",
    "offload.from_pretrained('dir', memory_budget='4M', {})": "compute_on_host",
    "offload.stream_weights(m, 'dir', memory_budget='4M', {})": "compute_on_host",
    "offload.save_on_nvme('dir', {})": "checksums",
    "offload.swap_params(m, 'dir', memory_budget='4M', {})": "checksums",
    "offload.swap_params(m, 'dir', memory_budget='4M').gathered(m.parameters(), {}).__enter__()": "change",
    "offload.swap_gradients(m.parameters(), 'dir', {})": "checksums",
    "offload.NvmeOptimizer(m.parameters(), torch.optim.AdamW, 'dir', {})":
        "master_weights reuse free_gradients checksums",
    "offload.NvmeOptimizer(m.parameters(), torch.optim.AdamW, 'dir').save_states('x', {})": "durable",
}  # fmt: skip
CALLBACKS = {
    "h.submit_pread(t[:1].view(torch.uint8), 'text').add_done_callback({})": "function",
    "data.SampleStore('store', {})": "transform",
    "data.Loader('store', {})": "decode collate_fn",
    "offload.swap_params(m, 'dir', memory_budget='4M', {})": "param_init_fn",
}

#: What is written, the class of the exception, and words of its sentence.
CALLS: list[tuple[str, type[BaseException], str]] = [
    # Handles
    ("nvme_ops.aio_handle(block_size='1M')", TypeError, "block_size must be an int, not str"),
    ("nvme_ops.aio_handle(block_size=0)", ValueError, "block_size must lie between 1 and"),
    ("nvme_ops.aio_handle(backend='uring')", ValueError, "is not one of auto, io_uring, libaio, threads"),
    ("nvme_ops.aio_handle(cache='no')", ValueError, "cache must be 'auto', 'direct' or 'buffered'"),
    ("nvme_ops.aio_handle(blocksize=3)", TypeError, "unexpected keyword argument 'blocksize'"),
    ("nvme_ops.aio_handle.tuned('/no/such')", FileNotFoundError, "is a disk not mounted.*'/no'"),
    ("nvme_ops.aio_handle.adaptive('.', objective='time')", TypeError, "objective"),
    ("nvme_ops.aio_handle(backend=5)", TypeError, "backend must be a str, not int"),
    ("nvme_ops.aio_handle.tuned('.', way='gpus')", ValueError, "way must be one of 'cpu', 'gpu', 'gds', not 'gpus'"),
    ("nvme_ops.empty(1.5)", TypeError, "size must consist of integers"),
    # Transfers
    ("h.sync_pread(t, 'missing')", FileNotFoundError, "opening the file to read: No such file.*'missing'"),
    ("h.sync_pread(t, 'dir')", IsADirectoryError, "'dir'"),
    ("h.sync_pread(t, 'text')", EOFError, "passes the end of the file, which has 5 bytes: 'text'"),
    ("h.sync_pread(t, 'text', -1)", ValueError, "file_offset must not be negative"),
    ("h.sync_pread([1, 2], 'text')", TypeError, r"must be a torch\.Tensor or .* buffer, not list"),
    ("h.sync_pread(t, 5.5)", TypeError, "a file must be a path or a file descriptor, not float"),
    ("h.sync_pread(t.view(10, 100).t(), 'text')", ValueError, "read into a contiguous tensor and copy it"),
    ("h.sync_pwrite(t.to('meta'), 'x')", ValueError, "with memory of its own"),
    ("h.sync_pwrite(t.to_sparse(), 'x')", ValueError, "dense, strided tensor"),
    ("h.submit_pread(t, 'text', priority='high')", TypeError, r"Priority\.PREFETCH, not 'high'"),
    ("h.new_cpu_locked_tensor(-1, t)", ValueError, "num_elem must not be negative"),
    ("nvme_ops.open('x', 'rw')", ValueError, "mode must be one of 'r'"),
    ("nvme_ops.open('x', 'w').write(t)", TypeError, r"write takes bytes, not Tensor: pwrite\(tensor, offset\)"),
    ("nvme_ops.open('x', 'w').write('words')", TypeError, "write takes bytes, not str"),
    ("nvme_ops.open('s3://bucket/x')", ValueError, "s3:// is no local file"),
    ("nvme_ops.load('hf://org/model')", ValueError, "only local files can be saved and loaded: copy it to"),
    # Checkpoints
    ("nvme_ops.save('x.pt', m)", TypeError, r"path must be a str .* not Linear: save\(obj, path\)"),
    ("nvme_ops.save({'a': t}, 'missing/x.pt')", FileNotFoundError, "no such folder; is a disk not mounted"),
    ("nvme_ops.save({'a': t}, 'x.xyz')", ValueError, r"x\.xyz: the name does not end with any of .* give format="),
    ("nvme_ops.save({'a': t}, 'x.pt', format='zip')", ValueError, "format must be one of"),
    ("nvme_ops.save({'a': 1}, 'x.safetensors')", TypeError, r"'a' is a int, not a tensor: save it as \.pt"),
    ("nvme_ops.save([t], 'x.safetensors')", TypeError, r"a dict of tensors by name, not list: save it as \.pt"),
    ("nvme_ops.save({'a': t, 'b': t}, 'x.safetensors')", ValueError, "share memory.* save one of them, or a clone"),
    ("nvme_ops.save({'a': t}, 'x.pt', metadata={'a': 1})", TypeError, "metadata must map strings"),
    ("nvme_ops.save({'a': t}, 'x.pt', max_shard_size='1GB')", ValueError, "name a folder or an index"),
    ("nvme_ops.save({'a': t}, 'x', recycle=True)", ValueError, "recycle=True works for one file"),
    ("nvme_ops.save(lambda: 1, 'x.pt')", Exception, "pickle"),
    ("nvme_ops.save_async({'a': t}, 'x.pt', strategy='fast')", ValueError, "strategy must be "),
    ("nvme_ops.load('missing.pt')", FileNotFoundError, r"'missing\.pt'"),
    ("nvme_ops.load(5)", TypeError, r"path must be a str .* not int: load\(path\)"),
    ("nvme_ops.load('text')", ValueError, "text: the name does not end with any of .* give format="),
    ("nvme_ops.load('text', format='pt')", nvme_ops.FormatError, "text: "),
    ("nvme_ops.load('dir')", nvme_ops.FormatError, r"is a folder that has none of model\.safetensors"),
    ("nvme_ops.load('ok.pt', keys=['b'])", KeyError, "has no tensor 'b'"),
    ("nvme_ops.load('ok.pt', into=5)", TypeError, "into must be a module or a dict of tensors, not int"),
    ("nvme_ops.load('ok.safetensors', into=m)", KeyError, "no counterpart in into=; .* strict=False"),
    ("nvme_ops.load('ok.safetensors', into={'a': t[:5]})", ValueError, r"shape \(1000,\), and the one to .*\(5,\)"),
    ("safe_open('ok.safetensors', 'tf')", ValueError, "framework must be 'pt' or 'np'"),
    ("nvme_ops.load('ok.pt', map_location='gpu')", RuntimeError, "device string: gpu"),
    ("nvme_ops.dcp.save('x', {'a': t})", TypeError, r"the path must be .* not dict: save\(state_dict, checkpoint_id\)"),
    # Handles and folders of all kinds of objects
    *[
        (call.format("handle=5"), TypeError, "handle must be an aio_handle or a gds_handle, not int")
        for call in (
            "nvme_ops.open('text', {})",
            "nvme_ops.save({{'a': t}}, 'x.pt', {})",
            "nvme_ops.save_async({{'a': t}}, 'x.pt', {})",
            "nvme_ops.load('ok.pt', {})",
            "nvme_ops.dcp.NvmeStorageWriter('x', {})",
            "nvme_ops.dcp.NvmeStorageReader('x', {})",
            "data.SampleStore('store', {})",
            "storage.TensorStore(storage.Session('dir', name='x'), {})",
            "safe_open('ok.safetensors', 'pt', {})",
            "offload.stream_weights(m, 'dir', memory_budget='4M', {})",
            "offload.swap_params(m, 'dir', memory_budget='4M', {})",
            "offload.swap_gradients(m.parameters(), 'dir', {})",
            "offload.NvmeOptimizer(m.parameters(), torch.optim.AdamW, 'dir', {})",
            "offload.save_on_nvme('dir', {})",
        )
    ],
    *[
        (call, TypeError, "folders? must be a path, or a list of several, not (int|Linear)")
        for call in (
            "storage.Session(5, name='x')",
            "data.SampleWriter(5)",
            "offload.stream_weights(m, 5, memory_budget='4M')",
            "offload.swap_gradients(m.parameters(), m)",
            "offload.save_on_nvme(m)",
        )
    ],
    ("storage.Session('dir', name=5)", TypeError, "name must be a str, not int"),
    ("storage.TensorStore('dir')", TypeError, r"must be a Session, not str: Session\(folder, name=...\)"),
    ("storage.TensorStore(storage.Session('dir', name='x'), 5)", TypeError, "must be a Pool, not int: Pool"),
    *[
        (call.format(f"{name}={value!r}"), TypeError, f"{name} must be {words}, not {type(value).__name__}")
        for calls, value, words in ((SWITCHES, "no", "a bool"), (CALLBACKS, 5, "callable"))
        for call, names in calls.items()
        for name in names.split()
    ],
    # Folders where a disk should be
    *[
        (call, FileNotFoundError, f"none is made directly below {parent}; is a disk not mounted.*'{parent}/?nosuch'")
        for call, parent in (
            ("storage.Session('/nosuch', name='x')", "/"),
            ("storage.Session('/nosuch/', name='x')", "/"),
            ("storage.Session('/mnt/nosuch', name='x')", "/mnt"),
            ("data.SampleWriter('/nosuch', bytes)", "/"),
            ("data.AsyncLog('/nosuch/log')", "/"),
            ("offload.save_on_nvme('/nosuch')", "/"),
        )
    ],
    # Models larger than memory
    ("offload.stream_weights(m, '/no/such/x', memory_budget='4M')", FileNotFoundError, "is a disk not mounted.*'/no'"),
    ("offload.stream_weights(m, 'text', memory_budget='4M')", NotADirectoryError, "'text'"),
    ("offload.stream_weights(m, 'dir', memory_budget='4')", ValueError, "at least .* are needed"),
    ("offload.stream_weights(m, 'dir', memory_budget='4X')", ValueError, "is not a size; examples: 512M"),
    ("offload.stream_weights(m, 'dir')", TypeError, "either memory_budget= or memory="),
    ("offload.stream_weights('m', 'dir', memory_budget='4M')", TypeError, r"a torch\.nn\.Module, not str"),
    ("offload.stream_weights(torch.nn.ReLU(), 'dir', memory_budget='4M')", ValueError, "the model has no weights"),
    ("offload.stream_weights(m, 'dir', memory_budget='4M', quantize='int3')", ValueError, "None or 'int8'"),
    ("offload.from_pretrained('dir', memory_budget='4M')", FileNotFoundError, "nvme-checkpoint convert"),
    ("offload.from_pretrained(5, memory_budget='4M')", TypeError, "path must be a folder, files or a name"),
    # Sizes
    ("storage.Pool('4M').lease(1.5)", TypeError, "nbytes must be bytes or a size"),
    ("storage.Pool('64X')", ValueError, "budget: '64X' is not a size; examples: 512M"),
    ("nvme_ops.save_async({'a': t}, 'x.pt', memory='lots')", ValueError, "memory: 'lots' is not a size"),
    ("data.SampleWriter('dir/s', shard_bytes=True)", TypeError, "shard_bytes must be bytes or a size such as '4G'"),
    ("offload.NvmeCache('dir', '4M', config=m)", TypeError, r"config must be .* \(model\.config\), not Linear"),
    ("offload.from_pretrained('dir', memory_budget='4M', quantize='int8')", ValueError, "argument of stream_weights"),
    ("offload.from_pretrained([], memory_budget='4M')", ValueError, "path must name at least one file"),
    # Training
    ("offload.NvmeOptimizer(m.parameters(), torch.optim.SGD(m.parameters(), lr=1), 'dir')", TypeError, "its class"),
    ("offload.NvmeOptimizer(torch.optim.AdamW, m.parameters(), 'dir')", TypeError, "not the class AdamW"),
    ("offload.NvmeOptimizer(m, torch.optim.AdamW, 'dir')", TypeError, r"not a module: model\.parameters\(\)"),
    ("offload.NvmeOptimizer(m.parameters(), torch.optim.LBFGS, 'dir')", TypeError, "is not one of torch.optim's"),
    ("offload.NvmeOptimizer([], torch.optim.AdamW, 'dir')", ValueError, "empty parameter list"),
    ("offload.NvmeOptimizer(m.parameters(), torch.optim.AdamW, 'dir', memory_budget=9)", ValueError, "at least 1 MiB"),
    ("offload.NvmeOptimizer(m.parameters(), torch.optim.AdamW, 'dir', overlap='x')", ValueError, "None or 'backward'"),
    ("offload.swap_params(m, 'dir', memory_budget='1K')", MemoryError, r"of 1\.373 MiB.* does not fit .* 1 KiB"),
    ("offload.swap_params('dir', m, memory_budget='4M')", TypeError, r"module must be a torch\.nn\.Module, not str"),
    ("offload.swap_gradients('dir', m.parameters())", TypeError, r"not str: model\.parameters\(\)"),
    ("offload.swap_gradients([], 'dir')", ValueError, "no parameters that take a gradient"),
    ("offload.save_on_nvme('dir', policy='never')", ValueError, "is not one of nvme, auto"),
    ("offload.save_on_nvme('dir', memory_budget=-1)", ValueError, "memory_budget must be at least 0 bytes, not -1"),
    # Data
    ("data.SampleWriter('dir/s', {'a': 'x'})", TypeError, "column 'a' must be bytes, str, int, float, bool, a dtype"),
    ("data.SampleWriter('dir/s', {})", ValueError, "columns must not be empty"),
    ("with data.SampleWriter('w', {'a': int}) as w: w.add(5)", TypeError, "a sample must be a dict of 'a', not int"),
    ("with data.SampleWriter('w', {'a': int}) as w: w.add({'b': 1})", KeyError, "must be a dict of 'a', not of 'b'"),
    ("data.SampleStore('store')[0:2]", TypeError, r"must be an int, not slice: read\(\) takes several"),
    ("data.SampleStore('dir')", nvme_ops.FormatError, "has no samples: no index.nvmedata"),
    ("data.AsyncLog('dir/log', window=-1)", ValueError, "between 0.001 and 3600 seconds"),
    ("list(data.AsyncLog.read('missing'))", FileNotFoundError, "no log of this name: 'missing'"),
]


@pytest.fixture
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(folder)
    (folder / "dir").mkdir()
    (folder / "text").write_text("words")
    t = torch.ones(1000)
    for name in ("ok.pt", "ok.safetensors"):
        nvme_ops.save({"a": t}, name)
    with data.SampleWriter("store") as writer:
        writer.add(b"sample")
    names = {"torch": torch, "nvme_ops": nvme_ops, "data": data, "offload": offload, "storage": storage}
    with nvme_ops.aio_handle() as handle:  # its reads end before the folder is removed
        yield {**names, "safe_open": safe_open, "t": t, "m": torch.nn.Linear(600, 600), "h": handle}


@pytest.mark.parametrize(("call", "kind", "words"), CALLS, ids=[call for call, _, _ in CALLS])
def test_a_mistake_is_one_sentence(place: dict[str, Any], call: str, kind: type[BaseException], words: str) -> None:
    if "from_pretrained" in call or "NvmeCache" in call:
        pytest.importorskip("transformers")
    with pytest.raises(kind) as raised:
        exec(call, place)
    assert re.search(words, str(raised.value))
    assert "\n" not in str(raised.value).strip()


#: What is not checked: what torch has or calls; what compiles; the same as ``aio_handle``; what memory is like.
UNCHECKED = re.compile(r"NvmeOptimizer\.(zero_grad|step)|NvmeStorage\w+\.|\w+Builder|gds_handle|Pool$")


def test_every_switch_and_callback_is_in_the_table() -> None:
    missing = []
    for name, member in public():
        ours = callable(member) and str(getattr(member, "__module__", "")).startswith("nvme_ops")
        if not ours or UNCHECKED.match(name) or (inspect.isclass(member) and issubclass(member, Exception)):
            continue
        for argument in inspect.signature(member).parameters.values():
            kind, own = str(argument.annotation), f"{name.rpartition('.')[2]}("
            calls = SWITCHES if kind == "bool" else CALLBACKS if kind.startswith("Callable[") else {}
            known = [names.split() for call, names in calls.items() if own in call]
            if calls and argument.kind is not argument.VAR_KEYWORD and not any(argument.name in row for row in known):
                missing.append(f"{name}({argument})")
    assert missing == []


#: Modules of commands, words that are wrong, and what is said of them.
MISUSED = {
    "measure.bench": {
        "--folder /no/such --read": "/no/such: no such folder",
        "--folder dir --io_size 9999T": "of free space are needed and there are .* --io-size or --folder",
        "--folder dir --engine fast": "--engine fast: there are aio_handle, gds_handle, torch, python, and all",
        "--folder_to_device_mapping dir:0 /none:1": "/none: no such folder",
        "--folder_to_device_mapping dir": "dir: not FOLDER:NUMBER",
        "--folder_to_device_mapping dir:0 --multi_process 2": "has one process for each folder",
        "--folder_to_device_mapping dir:0 .:1 --scaling --sweep queue-depth=1,2": "are two runs",
        "--folder dir --cached": "--cached goes with --read",
        "--folder dir --use_gds": "--use-gds goes with --device cuda",
        "--folder dir --scaling": "--scaling needs several folders",
        "--folder dir --sweep blocks=1M": "blocks=1M: not NAME=VALUE,...; names are block-size, queue-depth",
        "--folder dir --sweep block-size=1M,0": "--sweep block-size: '0' is not a size",
        "--folder dir --sweep single-submit=maybe": "--sweep single-submit: 'maybe' is neither true nor false",
        "--folder dir --sweep block_size=1M block_size=2M": "--sweep block_size: twice",
        "--folder dir --output none/such.json": "--output none/such.json: its folder does not exist",
        "--folder dir --output a.foo": "--output a.foo: ",
        "--folder dir --bloc 1M": "unrecognized arguments: --bloc 1M",  # abbreviations break when a flag is added
        "explain dir --rounds 1": "--rounds 1: at least 2",
        "explain dir --device cuda:77": "--device cuda:77: torch sees",
        "explain dir --device tpu": "--device tpu: neither cpu nor cuda:N",
        "explain text --write": "a file that exists is only read",
        "workload resnet50 --folder missing": "no such folder",
        "workload cosmoflow --folder dir --seconds nan": "must be numbers greater than 0",
        "workload cosmoflow --folder dir --output x.png": "ends with .json",
        "workload llm-checkpoint --folder dir --reader nvme_ops": "--reader is for jobs that read",
        "workload llm-checkpoint --folder dir --accelerators 2": "--accelerators is for jobs that read",
    },
    "measure.tune": {
        "": "required: --folder",
        "--nvme_dir dir /no/such": "/no/such: no such folder",
        "--nvme_dir dir --no_read --no_write": "leave nothing to measure",
        "--nvme_dir dir --loops 0": "--loops: '0' is not a number of at least 1",
        "--nvme_dir dir --output a.png": "a file's name ends with .json",
        "--nvme_dir dir --log_dir /proc/nothing": "No such file or directory: '/proc/nothing'",
        "--nvme_dir missing --log_dir log": "missing: no such folder",  # and no folder is made
        "--nvme_dir dir --sweep_config /no/such": "--sweep-config /no/such: .*No such file",
        "--nvme_dir dir --sweep_config text": "--sweep-config text: ",
    },
    "checkpoint.cli": {
        "info text": "does not end with",
        "verify dir": "none of model",
        "diff ok.pt": "required: SECOND",
        "convert ok.pt missing/x.safetensors": "is a disk not mounted",
    },
    "data.cli": {"convert dir out": "dir", "verify text": "text"},
    "report.cli": {"--paths x": "unrecognized arguments"},
    "offload.cli": {"plan dir --memory 1G": "nvme-checkpoint convert", "plan": "required: MODEL"},
}
COMMANDS = [(module, words, said) for module, rows in MISUSED.items() for words, said in rows.items()]


@pytest.mark.parametrize(("module", "words", "said"), COMMANDS)
def test_a_mistake_in_a_command_is_a_line(
    place: dict[str, Any], folder: Path, module: str, words: str, said: str
) -> None:
    if module == "offload.cli":
        pytest.importorskip("transformers")
    status, errors = refusal(importlib.import_module(f"nvme_ops.{module}").main, words.split())
    assert status == 2, errors
    *usage, last = errors.splitlines()
    assert re.search(said, last), errors
    assert all(line.startswith(("usage: ", " ")) for line in usage), errors
    assert sorted(os.listdir(folder)) == ["dir", "ok.pt", "ok.safetensors", "store", "text"]


#: What is in the file of ``nvme-tune --sweep-config``; its values are those of ``nvme-bench --sweep``.
SWEEPS = {
    "{": "Expecting property name",
    '{"queue_depth": 32}': "not an object with lists of values",
    '{"blocksize": [1]}': "'blocksize' is none of block_size, queue_depth",
    '{"queue_depth": [true]}': "queue_depth: 'True' is not a number",
    '{"queue_depth": [8], "queue-depth": [9]}': "queue-depth: twice",
}


@pytest.mark.parametrize("text", SWEEPS)
def test_a_wrong_sweep_is_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(text)
    status, errors = refusal(tune.main, ["--nvme_dir", str(tmp_path), "--sweep_config", str(path)])
    assert status == 2
    assert f"--sweep-config {path}: " in errors
    assert SWEEPS[text] in errors
