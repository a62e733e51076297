"""A classifier of skorch that compiles its module, trained on scikit-learn's digits."""

import hashlib

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from skorch.toy import make_classifier

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X = (X[:256] / 16).astype("float32")
net = NeuralNetClassifier(
    make_classifier(input_units=64, output_units=10, hidden_units=32, num_hidden=2, dropout=0),
    compile=True,
    max_epochs=2,
    lr=0.1,
    batch_size=64,
    train_split=None,
    verbose=0,
)
net.fit(X, y[:256].astype("int64"))
weights = b"".join(value.numpy().tobytes() for value in net.module_.state_dict().values())
print(net.predict(X).tolist(), net.history[:, "train_loss"])
print(hashlib.sha256(weights).hexdigest())
