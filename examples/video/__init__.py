"""A video is read frame by frame, and each frame is asked of an image model whose batches it shares with everybody else's.

fetching.py   from an address to a file: which hosts, how large, how long
frames.py     from a file to frames, with PyAV (`pip install av`)
models.py     the image model, and the streaming model of videos
app.py        both in one server: `VIDEO_HOSTS=videos.example uvicorn --factory examples.video.app:make`
"""
