"""Triton's model, by its Python backend."""

import numpy
import triton_python_backend_utils as utils
from computing import compute, judged


class TritonPythonModel:
    def execute(self, requests):
        rows = [numpy.from_dlpack(utils.get_input_tensor_by_name(each, "x")) for each in requests]
        compute(judged()[0], sum(map(len, rows)))
        return [utils.InferenceResponse(output_tensors=[utils.Tensor.from_dlpack("y", each.copy())]) for each in rows]
