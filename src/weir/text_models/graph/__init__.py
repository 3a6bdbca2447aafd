"""The ONNX graph of a sentence encoder, built from its weights: token ids in, vectors out."""
