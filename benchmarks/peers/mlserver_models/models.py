"""MLServer 1.7.1: the two models, as its own documentation writes models."""

import numpy
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Simple(MLModel):
    """Sum and difference of two rows of 16 numbers."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        first, second = (NumpyCodec.decode_input(tensor) for tensor in payload.inputs)
        return _response(self.name, OUTPUT0=first + second, OUTPUT1=first - second)


class Mean(MLModel):
    """The mean of the first row of each image."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        images = NumpyCodec.decode_input(payload.inputs[0])
        return _response(self.name, MEAN=images[:, 0, 0].mean(axis=1, keepdims=True, dtype=numpy.float32))


def _response(name: str, **arrays: numpy.ndarray) -> InferenceResponse:
    outputs: list[ResponseOutput] = [NumpyCodec.encode_output(key, array) for key, array in arrays.items()]
    return InferenceResponse(model_name=name, outputs=outputs)
