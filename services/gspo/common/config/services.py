"""The section `services`: addresses, TLS and credentials of the services, and their supervision."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, model_validator

from gspo.common.config.fields import HTTP_HOST, FilePath, HostName, Section
from gspo.common.errors import NO_VALUE, ConfigError

Port = Annotated[int, Field(ge=0, le=65535)]


class TlsConfig(Section):
    """Certificates of the services: with them HTTP and gRPC speak TLS."""

    may_change = True

    cert: FilePath | None = Field(
        None, description="Certificate of every service, in PEM, with its chain; it enables TLS"
    )
    key: FilePath | None = Field(None, description="The certificate's private key, in PEM, without a passphrase")
    ca: FilePath | None = Field(
        None, description="Certificates of the authorities of services and Redis; default: those of the machine"
    )
    server_name: str | None = Field(
        None, description="Name in the services' certificate, checked instead of the host name"
    )

    @property
    def is_on(self) -> bool:
        """Whether the services speak TLS."""
        return self.cert is not None

    @model_validator(mode="after")
    def _is_whole(self) -> TlsConfig:
        for key, other in (("cert", "key"), ("key", "cert"), ("server_name", "cert")):
            if getattr(self, key) is not None and getattr(self, other) is None:
                raise ConfigError(key, NO_VALUE, f"is of no use without services.tls.{other}", "Set both, or neither")
        return self


class ServicesConfig(Section):
    """Addresses and credentials of the services."""

    may_change = True

    host: str = Field(
        "127.0.0.1",
        description="Address of every service and of the run's own Redis. Beyond loopback, token_file and "
        "redis_password_file are required",
    )
    redis_url: str | None = Field(None, description="URL of Redis, rediss:// for TLS; null: the run starts its own")
    redis_password_file: FilePath | None = Field(
        None, description="File with Redis's password; one on another machine must have it"
    )
    coordinator_port: Port = Field(0, description="Run state and control over REST; 0 picks a free port")
    reward_port: Port = Field(0, description="Reward functions over REST; 0 picks a free port")
    http_hosts: tuple[HostName, ...] = Field(
        (),
        description="Host names that HTTP requests may use, such as *.example.org; localhost, this machine's name "
        "and IP addresses always work",
    )
    token_file: FilePath | None = Field(None, description="File with the token that services show each other")
    lease_s: PositiveFloat = Field(30.0, description="A worker silent for so long loses its work to another")
    otlp_endpoint: str | None = Field(
        None, pattern=HTTP_HOST, description="Collector of traces by OTLP over gRPC, such as http://127.0.0.1:4317"
    )
    max_restarts: int = Field(5, ge=0, description="Restarts of a crashing service before the run ends")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines written"
    )
    tls: TlsConfig = Field(default_factory=TlsConfig)

    @model_validator(mode="after")
    def _no_password_in_the_open(self) -> ServicesConfig:
        if self.redis_url is not None and urlsplit(self.redis_url).password is not None:
            raise ConfigError(
                "redis_url",
                NO_VALUE,
                "holds a password, which the run directory and its logs would keep",
                "Leave it out there, write it into a file and name that in services.redis_password_file",
            )
        return self
