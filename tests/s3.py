"""An S3 server inside the test's process, and what programs need to find it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Its address; fsspec in this process, and in those that it starts, finds the bucket there as s3://BUCKET."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with patch.dict(os.environ, {**KEYS, "AWS_ENDPOINT_URL": address}):
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(bucket)
        try:
            yield address
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            server.stop()
