{{/* Environment of every Ray container: (dict "root" $ "pod" (head block or worker group)) */}}
{{- define "everwarm.env" -}}
{{- $v := .root.Values -}}
# The root file system is read-only and the uid may be any: whatever writes to a home writes to the scratch volume.
- {name: HOME, value: /tmp}
- {name: USER, value: everwarm}
- {name: XDG_CACHE_HOME, value: /tmp/.cache}
- {name: TRITON_CACHE_DIR, value: /tmp/.cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /tmp/.cache/inductor}
- {name: HF_HOME, value: {{ printf "%s/huggingface" $v.modelCache.mountPath | quote }}}
{{- if $v.modelCache.readOnly }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# Ray lowers its workers' priority by default, which costs latency where a replica shares the node's cores.
- {name: RAY_worker_niceness, value: "0"}
# On SIGTERM `ray start` drains its node for so long before it ends; Serve moves replicas and proxies meanwhile.
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ include "everwarm.leaveSeconds" .root | quote }}}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: {{ ternary "1" "0" $v.haproxy.enabled | quote }}}
{{- if $v.haproxy.enabled }}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ $v.haproxy.hardStopAfterSeconds | int | quote }}}
- {name: RAY_SERVE_HAPROXY_NBTHREAD, value: {{ $v.haproxy.threads | int | quote }}}
# With splicing, HAProxy misses clients that leave early (cluster/environment.py, HAPROXY_BALANCE).
- {name: RAY_SERVE_HAPROXY_BALANCE_ALGORITHM, value: "leastconn\n    no option splice-request"}
{{- end }}
{{- if .worker }}
- {name: EVERWARM_TOKEN_PLANE_SECRET_FILE, value: /etc/everwarm/secrets/token-plane}
{{- end }}
{{- with $v.secrets.huggingFace }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- with concat ($v.extraEnv | default list) (.pod.extraEnv | default list) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Volumes of a Ray pod: (dict "root" $ "pod" … "worker" bool). KubeRay leaves "shared-mem" and "ray-logs" alone
when they exist, and would otherwise add its own without a size limit. */}}
{{- define "everwarm.volumes" -}}
{{- $v := .root.Values -}}
- name: shared-mem
  emptyDir: {medium: Memory, sizeLimit: {{ .pod.shmSize | default "2Gi" | quote }}}
- name: scratch
  emptyDir: {sizeLimit: {{ $v.tmp.size | quote }}}
- name: ray-logs
  emptyDir: {sizeLimit: {{ $v.tmp.logSize | quote }}}
{{- if eq $v.kind "RayCluster" }}
- name: serve-config
  configMap: {name: {{ include "everwarm.fullname" .root }}-serve}
{{- end }}
{{- if .worker }}
- name: secrets
  projected:
    sources:
      - secret:
          name: {{ $v.secrets.tokenPlane.existingSecret | quote }}
          items: [{key: {{ $v.secrets.tokenPlane.key | quote }}, path: token-plane}]
      {{- if and $v.secrets.apiKeys.existingSecret (ne (.pod.role | default "any") "replica") }}
      - secret:
          name: {{ $v.secrets.apiKeys.existingSecret | quote }}
          items: [{key: {{ $v.secrets.apiKeys.key | quote }}, path: api-keys}]
      {{- end }}
- name: models
{{- if eq $v.modelCache.type "emptyDir" }}
  emptyDir: {sizeLimit: {{ $v.modelCache.size | quote }}}
{{- else }}
  persistentVolumeClaim:
    claimName: {{ include "everwarm.cacheClaim" .root }}
    readOnly: {{ $v.modelCache.readOnly }}
{{- end }}
{{- end }}
{{- with .pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "everwarm.volumeMounts" -}}
{{- $v := .root.Values -}}
- {name: shared-mem, mountPath: /dev/shm}
- {name: scratch, mountPath: /tmp}
- {name: ray-logs, mountPath: /tmp/ray}
{{- if eq $v.kind "RayCluster" }}
- {name: serve-config, mountPath: /etc/everwarm/serve, readOnly: true}
{{- end }}
{{- if .worker }}
- {name: secrets, mountPath: /etc/everwarm/secrets, readOnly: true}
- name: models
  mountPath: {{ $v.modelCache.mountPath | quote }}
  readOnly: {{ $v.modelCache.readOnly }}
  {{- with $v.modelCache.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .pod.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "everwarm.ports" -}}
- {name: serve, containerPort: {{ .root.Values.serve.port }}}
- {name: metrics, containerPort: 8080}
{{- if not .worker }}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
- {name: client, containerPort: 10001}
- {name: as-metrics, containerPort: 44217}
- {name: dash-metrics, containerPort: 44227}
{{- end }}
{{- end -}}

{{- define "everwarm.resources" -}}
{{- $resources := deepCopy (.pod.resources | default dict) -}}
{{- $gpus := int (.pod.gpus | default 0) -}}
{{- if gt $gpus 0 -}}
{{- $name := .pod.gpuResource | default "nvidia.com/gpu" -}}
{{- range $side := list "requests" "limits" -}}
{{- $_ := set $resources $side (merge (dict $name (toString $gpus)) (get $resources $side | default dict)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The Ray container. It must stay the first one of its pod: KubeRay edits containers[0]. */}}
{{- define "everwarm.rayContainer" -}}
name: {{ ternary "ray-worker" "ray-head" .worker }}
image: {{ include "everwarm.image" (dict "root" .root "override" .pod.image "gpus" (.pod.gpus | default 0)) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  {{- include "everwarm.env" . | nindent 2 }}
{{- with concat (.root.Values.extraEnvFrom | default list) (.pod.extraEnvFrom | default list) }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  {{- include "everwarm.ports" . | nindent 2 }}
resources:
  {{- include "everwarm.resources" . | nindent 2 }}
{{- if .worker }}
lifecycle:
  preStop:
    exec:
      # Asks Serve to move this node's work elsewhere and waits until Ray has left. The node drains on SIGTERM too;
      # the hook does not depend on the shell, process 1 here, passing that signal on.
      command: [python, -m, cluster.leave, --timeout, {{ include "everwarm.leaveSeconds" .root | quote }}]
{{- end }}
{{- with .pod.probes }}
{{ toYaml . }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
volumeMounts:
  {{- include "everwarm.volumeMounts" . | nindent 2 }}
{{- end -}}

{{- define "everwarm.podLabels" -}}
{{ include "everwarm.selectorLabels" .root }}
app.kubernetes.io/component: {{ ternary "worker" "head" .worker }}
{{- if .worker }}
everwarm/group: {{ .name | quote }}
everwarm/role: {{ .pod.role | default "any" }}
{{- end }}
{{- with merge (dict) (.pod.podLabels | default dict) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Spread a group's pods over hosts, so that one host's death takes one of them. */}}
{{- define "everwarm.topologySpread" -}}
{{- if hasKey .pod "topologySpreadConstraints" -}}
{{- toYaml .pod.topologySpreadConstraints -}}
{{- else -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "everwarm.selectorLabels" .root | nindent 6 }}
      everwarm/group: {{ .name | quote }}
{{- end -}}
{{- end -}}

{{/* Pod template: (dict "root" $ "pod" (head block or group) "worker" bool "name" "group name") */}}
{{- define "everwarm.podTemplate" -}}
metadata:
  labels:
    {{- include "everwarm.podLabels" . | nindent 4 }}
  {{- with merge (dict) (.pod.podAnnotations | default dict) .root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with include "everwarm.serviceAccountName" .root }}
  serviceAccountName: {{ . }}
  {{- end }}
  # Only the autoscaler, in the head pod, talks to the API server.
  automountServiceAccountToken: {{ and (not .worker) .root.Values.autoscaling.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .pod.terminationGracePeriodSeconds | default (add (include "everwarm.leaveSeconds" .root) 30) | int }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- range $key := list "runtimeClassName" "priorityClassName" "schedulerName" }}
  {{- with get $.pod $key }}
  {{ $key }}: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- range $key := list "nodeSelector" "affinity" "tolerations" "resourceClaims" "initContainers" }}
  {{- with get $.pod $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if .worker }}
  {{- with include "everwarm.topologySpread" . }}
  topologySpreadConstraints:
    {{- . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - {{- include "everwarm.rayContainer" . | nindent 6 }}
    {{- with .pod.sidecars }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "everwarm.volumes" . | nindent 4 }}
{{- end -}}
