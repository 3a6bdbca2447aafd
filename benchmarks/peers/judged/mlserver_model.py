"""MLServer's model."""

from computing import compute, judged
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Judged(MLModel):
    async def predict(self, payload):
        rows = NumpyCodec.decode_input(payload.inputs[0])
        compute(judged()[0], len(rows))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", rows)])
