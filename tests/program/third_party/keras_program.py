"""Keras on torch, whose Trainer compiles the step of training, of evaluation and of prediction."""

import hashlib
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

torch.compiler.set_default_backend("aot_eager")
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, "gelu"), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss="mse", jit_compile=True)
random = np.random.default_rng(0)
x, y = random.normal(size=(64, 8)).astype("float32"), random.normal(size=(64, 1)).astype("float32")
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
print(history.history["loss"], model.evaluate(x, y, verbose=0), model.predict(x, verbose=0).sum())
print(hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest())
