"""Reading foreign file formats in bounded memory: tables, `.npz`, `tf.train.Example`, JSON,
published archives.
"""
