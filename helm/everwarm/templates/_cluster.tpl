{{/* A RayClusterSpec, for RayService.spec.rayClusterConfig and for a bare RayCluster. */}}
{{- define "everwarm.clusterSpec" -}}
rayVersion: {{ .Values.rayVersion | quote }}
{{- if .Values.auth.enabled }}
authOptions:
  mode: token
  {{- with .Values.auth.existingSecret }}
  secretName: {{ . | quote }}
  {{- end }}
{{- end }}
{{- if .Values.gcsFaultTolerance.enabled }}
gcsFaultToleranceOptions:
  {{- include "everwarm.gcsFaultTolerance" .Values.gcsFaultTolerance | nindent 2 }}
{{- end }}
enableInTreeAutoscaling: {{ .Values.autoscaling.enabled }}
{{- with .Values.autoscaling }}
{{- if .enabled }}
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ .idleTimeoutSeconds | int }}
  upscalingMode: {{ .upscalingMode }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  securityContext:
    {{- toYaml $.Values.securityContext | nindent 4 }}
  volumeMounts:
    - {name: scratch, mountPath: /tmp}
    - {name: ray-logs, mountPath: /tmp/ray}
{{- end }}
{{- end }}
headGroupSpec:
  serviceType: {{ .Values.head.serviceType }}
  rayStartParams:
    {{- include "everwarm.headStartParams" . | nindent 4 }}
  template:
    {{- include "everwarm.podTemplate" (dict "root" . "pod" .Values.head "worker" false "name" "head") | nindent 4 }}
workerGroupSpecs:
  {{- range $name, $group := include "everwarm.groups" . | fromYaml }}
  - groupName: {{ $name }}
    replicas: {{ $group.replicas | default (include "everwarm.groupMin" $group) | int }}
    minReplicas: {{ include "everwarm.groupMin" $group }}
    maxReplicas: {{ include "everwarm.groupMax" $group }}
    {{- if hasKey $group "idleTimeoutSeconds" }}
    idleTimeoutSeconds: {{ $group.idleTimeoutSeconds | int }}
    {{- end }}
    rayStartParams:
      {{- include "everwarm.workerStartParams" (dict "root" $ "group" $group) | nindent 6 }}
    template:
      {{- include "everwarm.podTemplate" (dict "root" $ "pod" $group "worker" true "name" $name) | nindent 6 }}
  {{- end }}
{{- end -}}

{{/* Values must be strings; no CPUs and GPUs, so that Serve never places work beside the control plane. */}}
{{- define "everwarm.headStartParams" -}}
{{- $params := dict "num-cpus" "0" "num-gpus" "0" "dashboard-host" "0.0.0.0" "metrics-export-port" "8080" -}}
{{- toYaml (merge (dict) .Values.head.rayStartParams $params) -}}
{{- end -}}

{{- define "everwarm.workerStartParams" -}}
{{- $params := dict "metrics-export-port" "8080" -}}
{{- if hasKey .group "numCpus" -}}{{- $_ := set $params "num-cpus" (toString .group.numCpus) -}}{{- end -}}
{{- if gt (int (.group.gpus | default 0)) 0 -}}{{- $_ := set $params "num-gpus" (toString (int .group.gpus)) -}}{{- end -}}
{{- if include "everwarm.placed" .root -}}
{{- $_ := set $params "resources" (include "everwarm.roleResources" (.group.role | default "any") | squote) -}}
{{- end -}}
{{- toYaml (merge (dict) (.group.rayStartParams | default dict) $params) -}}
{{- end -}}

{{- define "everwarm.gcsFaultTolerance" -}}
backend: {{ .backend }}
{{- with .redisAddress }}
redisAddress: {{ . | quote }}
{{- end }}
{{- if .existingSecret }}
redisPassword:
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .passwordKey | quote }}}}
{{- with .usernameKey }}
redisUsername:
  valueFrom: {secretKeyRef: {name: {{ $.existingSecret | quote }}, key: {{ . | quote }}}}
{{- end }}
{{- end }}
{{- with .externalStorageNamespace }}
externalStorageNamespace: {{ . | quote }}
{{- end }}
{{- with .storage }}
storage:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
