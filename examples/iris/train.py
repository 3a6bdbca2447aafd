"""Fits a classifier of iris flowers and writes it to iris.skops, which `weir serve iris.skops` serves."""

import skops.io
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

if __name__ == "__main__":
    features, species = load_iris(return_X_y=True)
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(features, species)
    skops.io.dump(model, "iris.skops")
    print(f"iris.skops: {model.score(features, species):.0%} of the flowers it has seen are right")
