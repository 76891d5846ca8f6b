"""Opens datasets to score on.

opening.py          which reader a source is for, and the names under which sets go
places.py           where published sets lie: here, in a store, at Hugging Face, by a name under a root
published.py        the layout in which the field publishes its sets: shards with text files beside them
annotations.py      what lies beside the pictures of shards
npy.py              arrays of numbers in shards, read with care
image_folder.py     ``ROOT/<class name>/*.jpg``, whose folder names are the class names with ``_`` for a space
split_names.py      what the folders and files of a split may be called
caption_tables.py   tables of captions, of which a dataset is packed first
torchvision_sets.py torchvision's own datasets
hugging_face.py     Hugging Face's datasets, as parquet files
parquet_files.py    which parquet files a source has, and their columns
parquet_pictures.py the pictures in parquet files, read as they are needed
caption_choices.py  SugarCrepe and ARO: a JSON file and a folder of pictures
file_pictures.py    pictures that are files, wherever they lie
some_pictures.py    some of a set's pictures as a set
text_files.py       files of text, read with care
checks.py           whether what was found goes together
"""

from eval.readers.opening import open_dataset, open_datasets
from eval.readers.parquet import open_hugging_face
from eval.readers.shards import find_published
from eval.readers.torchvision import open_torchvision

__all__ = ["find_published", "open_dataset", "open_datasets", "open_hugging_face", "open_torchvision"]
