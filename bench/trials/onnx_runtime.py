"""ONNX Runtime's 4-bit matrices (MatMulNBits) against the CPU library's whole step, in turns.

    .venv/bin/pip install --target /tmp/ort --no-deps onnx onnxruntime flatbuffers ml-dtypes
    PYTHONPATH=.:/tmp/ort .venv/bin/python bench/trials/onnx_runtime.py

The graph holds the model's linear layers and its head alone, one after the other: no norm, no attention, no cache. Weights are
random, in 4-bit blocks of 32 with a scale each (the head too, which the file may hold in 8 bits); ``accuracy_level`` 4 reads the
input as 8-bit integers, as the CPU library does. The graph is built once with every projection apart, and once
with q over k over v and gate over up, as the CPU library packs them. A product is checked against numpy first.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import onnxruntime
import torch
import typer
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bench.trials.steps import Request, Times, in_turns, report
from tiercel.core.config import EngineConfig, SpecConfig
from tiercel.engine.engine import load_target
from tiercel.models.description import ModelDescription

BLOCK, INT8_INPUTS = 32, 4
Floats = NDArray[np.float32]


class Graph:
    """A graph under construction, with random weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def linear(self, x: str, columns: int, rows: int) -> str:
        """Append ``x @ W.T`` for a random matrix; the name of the result."""
        name = f"linear{len(self.nodes)}"
        packed = self.random.integers(0, 256, (rows, columns // BLOCK, BLOCK // 2), np.uint8)
        # Values of -8 .. 7 have a variance of 21: results stay as large as inputs.
        scales = np.full((rows, columns // BLOCK), (21 * columns) ** -0.5, np.float32)
        for part, array in (("packed", packed), ("scales", scales)):
            self.weights.append(onnx.numpy_helper.from_array(array, f"{name}.{part}"))
        sizes = {"K": columns, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": INT8_INPUTS}
        inputs = [x, f"{name}.packed", f"{name}.scales"]
        self.nodes.append(helper.make_node("MatMulNBits", inputs, [name], domain="com.microsoft", **sizes))
        return name

    def apply(self, operator: str, inputs: list[str], **how: int) -> str:
        """Append another operator; the name of its result."""
        name = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **how))
        return name

    def slice(self, x: str, start: int, end: int) -> str:
        """Append columns ``start .. end - 1`` of ``x``."""
        name = f"columns{len(self.nodes)}"
        bounds = {"from": start, "to": end, "axis": 1}
        for part, value in bounds.items():
            self.weights.append(onnx.numpy_helper.from_array(np.array([value]), f"{name}.{part}"))
        return self.apply("Slice", [x, *(f"{name}.{part}" for part in bounds)])

    def session(self, columns: int, result: str, rows: int, threads: int) -> Callable[[Floats], Floats]:
        """The graph from ``x``, float32 ``[n, columns]``, to ``result``, ``[n, rows]``, ready to run."""
        shapes = [("x", columns), (result, rows)]
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in shapes)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(
            helper.make_graph(self.nodes, "trial", [x], [y], self.weights), opset_imports=opsets, ir_version=9
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

        def run(inputs: Floats) -> Floats:
            output: Floats = session.run(None, {"x": inputs})[0]
            return output

        return run


def whole_model(shape: ModelDescription, threads: int, *, fused: bool) -> Callable[[Floats], Floats]:
    """Every linear layer of a step, each reading what the one before it gave."""
    graph, width, inner = Graph(), shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    x = "x"
    for _ in range(shape.num_layers):
        if fused:
            mixed = graph.linear(x, width, query + 2 * key)
            attended = graph.slice(mixed, 0, query)
            both = graph.linear(graph.linear(attended, query, width), width, 2 * inner)
            gated = graph.apply("Add", [graph.slice(both, 0, inner), graph.slice(both, inner, 2 * inner)])
        else:
            q, k, v = (graph.linear(x, width, rows) for rows in (query, key, key))
            # Keys and values must be used, or they are not computed.
            tiled = graph.apply("Concat", [graph.apply("Add", [k, v])] * (query // key), axis=1)
            x = graph.linear(graph.apply("Add", [q, tiled]), query, width)
            gated = graph.apply("Add", [graph.linear(x, width, inner), graph.linear(x, width, inner)])
        x = graph.linear(gated, inner, width)
    return graph.session(width, graph.linear(x, width, shape.vocab_size), shape.vocab_size, threads)


def check_product(columns: int, rows: int, threads: int) -> None:
    """Hold one product against numpy: the graph multiplies with what it is said to multiply with."""
    graph = Graph()
    run = graph.session(columns, graph.linear("x", columns, rows), rows, threads)
    packed, scales = (onnx.numpy_helper.to_array(weight) for weight in graph.weights)
    values = np.stack([packed & 15, packed >> 4], -1).reshape(rows, columns).astype(np.float32) - 8
    x = graph.random.standard_normal((4, columns)).astype(np.float32)
    expected = x @ (values * scales.repeat(BLOCK, 1)).T
    error = float(np.linalg.norm(run(x) - expected) / np.linalg.norm(expected))
    print(f"one product against numpy: relative error {error:.4f}")
    if error > 0.02:  # 8-bit inputs in blocks of 32 cost about 0.005
        raise SystemExit("MatMulNBits computes something else")


def main(
    rows: Annotated[list[int], typer.Option(help="Rows of a step; repeatable.")] = [1, 2, 4, 8],  # noqa: B006
    runs: Annotated[int, typer.Option(help="Turns of each contender.")] = 20,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure."""
    target = load_target(EngineConfig(model=model), SpecConfig(method="none")).model
    shape, threads = target.description, torch.get_num_threads()
    check_product(shape.hidden_size, shape.intermediate_size, threads)
    graphs = {
        "ONNX Runtime, linear layers": whole_model(shape, threads, fused=False),
        "ONNX Runtime, linear layers, fused": whole_model(shape, threads, fused=True),
    }
    times: Times = {}
    for count in rows:
        x = np.random.default_rng(1).standard_normal((count, shape.hidden_size)).astype(np.float32)
        contenders: dict[str, Callable[[], object]] = {"Tiercel, whole step": Request(target, count)}
        contenders |= {name: partial(run, x) for name, run in graphs.items()}
        times[count] = in_turns(contenders, runs)
    report("4-bit matrices", times, {"onnxruntime": onnxruntime.__version__}, json_file)


if __name__ == "__main__":
    typer.run(main)
