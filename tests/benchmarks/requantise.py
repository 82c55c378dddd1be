"""A GGUF file's matrices in another format, by the numpy code of the package gguf: nothing is compiled.

    python -m tests.benchmarks.requantise SOURCE.gguf TARGET.gguf Q4_0

Q4_0 is the format in which llama.cpp is fastest on a CPU, since it repacks such matrices for its kernels. A matrix in
8 bits, such as the embedding, and what is in float stay as they are, as llama.cpp's own quantiser leaves them better
than the rest.
"""

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, ReaderField
from gguf.quants import dequantize, quantize

_KEPT = frozenset({"F32", "F16", "BF16", "Q8_0"})
_FILE_TYPES = {"Q4_0": LlamaFileType.MOSTLY_Q4_0, "Q8_0": LlamaFileType.MOSTLY_Q8_0}


def requantise(source: Path, target: Path, name: str) -> None:
    """Writes `target`, whole or not at all."""
    reader, scratch = GGUFReader(str(source)), target.with_suffix(".partial")
    wanted = GGMLQuantizationType[name]
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(str(scratch), str(architecture))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            _copy(writer, key, field)
    writer.add_file_type(_FILE_TYPES[name])
    for tensor in reader.tensors:
        if tensor.tensor_type.name in _KEPT:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            rows = dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, quantize(rows, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scratch.replace(target)


def _copy(writer: GGUFWriter, key: str, field: ReaderField) -> None:
    kind, *inner = field.types
    writer.add_key_value(key, field.contents(), kind, inner[-1] if kind == GGUFValueType.ARRAY else None)


if __name__ == "__main__":
    requantise(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
