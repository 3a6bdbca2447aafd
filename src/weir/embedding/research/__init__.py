"""The research corner: what each layer of a model says of labelled texts, and which texts are near to another."""
