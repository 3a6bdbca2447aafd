"""Sum and difference of two rows of 16 numbers."""

import numpy
import triton_python_backend_utils as utils


class TritonPythonModel:
    def execute(self, requests):
        pairs = [
            [numpy.from_dlpack(utils.get_input_tensor_by_name(each, name)) for name in ("INPUT0", "INPUT1")]
            for each in requests
        ]
        first = numpy.concatenate([pair[0] for pair in pairs])
        second = numpy.concatenate([pair[1] for pair in pairs])
        sums, differences = first + second, first - second
        answers, start = [], 0
        for pair in pairs:
            stop = start + len(pair[0])
            outputs = [
                utils.Tensor.from_dlpack("OUTPUT0", sums[start:stop]),
                utils.Tensor.from_dlpack("OUTPUT1", differences[start:stop]),
            ]
            answers.append(utils.InferenceResponse(output_tensors=outputs))
            start = stop
        return answers
