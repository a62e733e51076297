"""Edits of a dump's graph that a stranger might try, and why each is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def relu(document: dict[str, Any]) -> dict[str, Any]:
    return next(node for node in document["graph"]["nodes"] if node["target"] == "op:aten.relu.default")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def nested_graph(graph: dict[str, Any], depth: int) -> dict[str, Any]:
    output = {**graph["nodes"][-1], "args": {"tuple": [None]}}
    for _ in range(depth):
        graph = {"nodes": [output], "subgraphs": {"a": graph} if _ else {}, "constants": {}}
    return graph


Edit = Callable[[dict[str, Any]], Any]
GRAPH_EDITS: dict[str, tuple[Edit, str]] = {
    "os.system": (lambda d: relu(d).update(target="function:os:system", args={"tuple": ["touch pwned"]}), "os:system"),
    "builtins.eval": (lambda d: relu(d).update(target="function:builtins:eval"), "may call"),
    "builtins.exec": (lambda d: relu(d).update(target="function:builtins:__import__"), "may call"),
    "torch.load": (lambda d: relu(d).update(target="function:torch:load"), "may call"),
    "nested": (lambda d: relu(d).update(target="function:torch:ops.load_library"), "may call"),
    "load_library": (lambda d: relu(d).update(target="op:load_library.x.y"), "not registered"),
    "from_file": (lambda d: relu(d).update(target="op:aten.from_file.default"), "may not call"),
    "memory": (lambda d: relu(d).update(target="op:inductor._reinterpret_tensor.default"), "may not call"),
    "pool": (lambda d: relu(d).update(target="packet:inductor._alloc_from_pool"), "may not call"),
    "unchecked indices": (lambda d: relu(d).update(target="op:aten._index_put_impl_.default"), "may not call"),
    "unchecked sparse": (lambda d: relu(d).update(target="function:torch:_sparse_coo_tensor_unsafe"), "may not call"),
    "storage": (lambda d: relu(d).update(op="call_method", target="method:untyped_storage"), "may not call"),
    "storage function": (lambda d: relu(d).update(target="function:torch.Tensor:untyped_storage"), "may not call"),
    "resize storage": (lambda d: relu(d).update(target="op:inductor.resize_storage_bytes_.default"), "may not call"),
    "resize": (lambda d: relu(d).update(op="call_method", target="method:resize_"), "may not call"),
    "set": (lambda d: relu(d).update(target="packet:aten.set_"), "may not call"),
    "pointer": (lambda d: relu(d).update(target="function:torch:_from_blob"), "may not call"),
    "numpy": (lambda d: relu(d).update(op="call_method", target="method:numpy"), "may not call"),
    "alias": (lambda d: relu(d).update(target="op:aten._reshape_alias.default"), "may not call"),
    "printing": (lambda d: relu(d).update(target="higher_order:print"), "may not call"),
    "a function of the process": (lambda d: relu(d).update(target="higher_order:invoke_leaf_function"), "may not call"),
    "TorchScript": (lambda d: relu(d).update(target="packet:aten.percentFormat"), "may not call"),
    "a function as an argument": (
        lambda d: relu(d).update(args={"tuple": [{"target": "function:torch:load"}]}),
        "bad value",
    ),
    "code for C++": (
        lambda d: relu(d).update(args={"tuple": [{"node": "addmm"}, '"); system("touch pwned']}),
        "no word",
    ),
    "code for Python": (lambda d: relu(d).update(kwargs={"dict": [["mode", "a\nimport os"]]}), "no word"),
    "code in a key": (lambda d: relu(d).update(args={"tuple": [{"dict": [["a'\n", 1]]}]}), "no word"),
    "great number": (lambda d: relu(d).update(args={"tuple": [2**70]}), "64 bits"),
    "packet": (lambda d: relu(d).update(target="packet:aten.from_file"), "may not call"),
    "dunder": (lambda d: relu(d).update(op="call_method", target="method:__reduce_ex__"), "may not call"),
    "callback": (lambda d: relu(d).update(op="call_method", target="method:apply_"), "may not call"),
    "method of text": (
        lambda d: relu(d).update(op="call_method", target="method:split", args={"tuple": ["a"]}),
        "needs a node",
    ),
    "getattr": (
        lambda d: relu(d).update(target="function:builtins:getattr", args={"tuple": ["x", "__class__"]}),
        "may not read",
    ),
    "getattr of a node": (
        lambda d: relu(d).update(target="function:builtins:getattr", args={"tuple": [5, {"node": "primals_1"}]}),
        "may not read",
    ),
    "a path in pairs": (lambda d: d["pairs"].update(joint="../../x"), "pairs"),
    "code in target": (lambda d: relu(d).update(target="op:aten.relu.default()\nimport os"), "names no operator"),
    "code in name": (lambda d: relu(d).update(name="a\nimport os"), "identifier"),
    "keyword": (lambda d: relu(d).update(name="import"), "reserved"),
    "no arguments": (lambda d: relu(d).update(args=None), "no tuple"),
    "argument": (lambda d: relu(d).update(args={"tuple": 5}), "bad value"),
    "output": (lambda d: d["graph"]["nodes"][-1].update(args={"tuple": []}), "one argument"),
    "expected": (lambda d: relu(d).update(expected={"tensor": {"symbolic": 5}}), "expected"),
    "deep": (lambda d: relu(d).update(args={"tuple": [nested(80)]}), "too deeply"),
    "deep graphs": (lambda d: d["graph"]["subgraphs"].update(a=nested_graph(d["graph"], 300)), "subgraphs"),
    "twice": (lambda d: relu(d).update(name=d["graph"]["nodes"][0]["name"]), "taken"),
    "input name": (lambda d: d["graph"]["nodes"][0].update(target="x=print('pwned')"), "no name of an input"),
    "future node": (lambda d: relu(d).update(args={"tuple": [{"node": "output"}]}), "no earlier node"),
    "unknown argument": (lambda d: relu(d).update(args={"tuple": [{"pickle": "gASV"}]}), "pickle"),
    "bad keyword": (lambda d: relu(d).update(kwargs={"dict": [["a b", 1]]}), "arguments"),
    "attribute": (
        lambda d: next(n for n in d["graph"]["nodes"] if n["op"] == "get_attr").update(target="__class__"),
        "neither",
    ),
    "no output": (lambda d: d["graph"]["nodes"].pop(), "output"),
    "extra key": (lambda d: d.update(run="me"), "run"),
    "kind": (lambda d: d.update(kind="../../x"), "kind"),
    "name": (lambda d: d.update(name="../../x"), "name"),
    "file": (lambda d: d["files"].update({"../../etc/passwd": "0" * 64}), "files"),
    "huge": (lambda d: d["storages"][0].update(end=2**47, checksum=None), "."),
    "negative": (lambda d: d["graph"]["constants"]["_tensor_constant0"].update(storage_offset=-1), "storage_offset"),
    "beyond": (lambda d: d["graph"]["constants"]["_tensor_constant0"].update(shape=[10**6]), "beyond its storage"),
    "dtype": (lambda d: d["graph"]["constants"]["_tensor_constant0"].update(dtype="load"), "no dtype"),
    "module hook": (
        lambda d: d["graph"]["constants"].update(forward=d["graph"]["constants"]["_tensor_constant0"]),
        "reserved",
    ),
}
